// The custom calls of traced operations. All memory is the host's: they serve XLA's CPU client.

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "export.h"
#include "registry.h"
#include "xla_ffi.h"

namespace jdelta {
namespace {

namespace ffi = xla::ffi;
using Scalar = ffi::BufferR0<ffi::S32>;

// Python turns an error of XLA that holds this word into a SpillError.
ffi::Error Failure(const Status& status) {
  return ffi::Error(ffi::ErrorCode::kAborted, "SpillError: " + status);
}

ffi::Future Ready(const Status& status) {
  ffi::Promise promise;
  ffi::Future future(promise);
  status.empty() ? promise.SetAvailable() : promise.SetError(Failure(status));
  return future;
}

// Runs `start(store, done)`; the future answers when it has answered or `done` has been called.
template <typename Start>
ffi::Future Answer(int64_t id, Start start) {
  std::shared_ptr<Store> store = FindStore(id);
  if (store == nullptr) {
    return Ready("the store of this step is closed; plan the step again");
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  auto done = [promise](const Status& status) mutable {
    status.empty() ? promise.SetAvailable() : promise.SetError(Failure(status));
  };
  std::optional<Status> status;
  try {
    status = start(*store, done);
  } catch (const std::exception& error) {  // of the system: no memory, no thread
    status = error.what();
  }
  if (status.has_value()) done(*status);
  return future;
}

ffi::Future Write(ffi::RunId run, int32_t device, int64_t id, int64_t slot, ffi::AnyBuffer x,
                  Scalar row, ffi::Result<Scalar> token) {
  *token->typed_data() = *row.typed_data();
  Key key{run.run_id, device, slot, *row.typed_data()};
  return Answer(id, [&](Store& store, Done done) {
    return store.Write(key, x.untyped_data(), x.size_bytes(), std::move(done));
  });
}

ffi::Future Read(ffi::RunId run, int32_t device, int64_t id, int64_t slot, Scalar,
                 Scalar row, ffi::Result<ffi::AnyBuffer> x) {
  Key key{run.run_id, device, slot, *row.typed_data()};
  return Answer(id, [&](Store& store, Done done) {
    return store.Read(key, x->untyped_data(), x->size_bytes(), std::move(done));
  });
}

// What every handler is given first.
auto Bound() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<int64_t>("store")
      .Attr<int64_t>("slot");
}

}  // namespace
}  // namespace jdelta

JDELTA_EXPORT XLA_FFI_Error* jdelta_spill_write(XLA_FFI_CallFrame* frame);
JDELTA_EXPORT XLA_FFI_Error* jdelta_spill_read(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdelta_spill_write, jdelta::Write,
                              jdelta::Bound()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jdelta::Scalar>()
                                  .Ret<jdelta::Scalar>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdelta_spill_read, jdelta::Read,
                              jdelta::Bound()
                                  .Arg<jdelta::Scalar>()
                                  .Arg<jdelta::Scalar>()
                                  .Ret<xla::ffi::AnyBuffer>());
