// The custom calls of traced operations, for CPUs and for GPUs.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cuda.h"
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
ffi::Future Answer(int64_t id, int64_t run, const Others& others, Start start) {
  std::shared_ptr<Store> store = FindStore(id);
  if (store == nullptr) return Ready(others.Answer(id, run, kClosed));
  ffi::Promise promise;
  ffi::Future future(promise);
  auto done = [=](const Status& found) mutable {
    Status status = others.Answer(id, run, found);
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

ffi::Future Write(ffi::RunId run, int32_t device, int64_t id, int64_t slot, bool others,
                  ffi::AnyBuffer x, Scalar row, ffi::Result<Scalar> token) {
  *token->typed_data() = *row.typed_data();
  Key key{run.run_id, device, slot, *row.typed_data()};
  return Answer(id, key.run, {others}, [&](Store& store, Done done) {
    return store.Write(key, x.untyped_data(), x.size_bytes(), std::move(done));
  });
}

ffi::Future Read(ffi::RunId run, int32_t device, int64_t id, int64_t slot, bool others, Scalar,
                 Scalar row, ffi::Result<ffi::AnyBuffer> x) {
  Key key{run.run_id, device, slot, *row.typed_data()};
  auto spoil = [data = x->untyped_data(), bytes = x->size_bytes()] {
    std::memset(data, kSpoiled, bytes);
    return Status();
  };
  return Answer(id, key.run, {others, spoil}, [&](Store& store, Done done) {
    return store.Read(key, x->untyped_data(), x->size_bytes(), std::move(done));
  });
}

ffi::Error Answered(const Status& status) {
  return status.empty() ? ffi::Error::Success() : Failure(status);
}

Cuda::Address AddressOf(const void* data) { return reinterpret_cast<Cuda::Address>(data); }

// On a GPU all memory is the device's, that of scalars too, and nothing has happened yet: what a
// handler does is put into the program's stream.
ffi::Error WriteOnGpu(Cuda::Stream stream, ffi::RunId run, int32_t device, int64_t id, int64_t slot,
                      bool others, ffi::AnyBuffer x, Scalar, ffi::Result<Scalar>) {
  Key place{run.run_id, device, slot, 0};
  return Answered(WriteOnLink(id, place, AddressOf(x.untyped_data()), x.size_bytes(), stream,
                              others));
}

ffi::Error ReadOnGpu(Cuda::Stream stream, ffi::RunId run, int32_t device, int64_t id, int64_t slot,
                     bool others, Scalar, Scalar, ffi::Result<ffi::AnyBuffer> x) {
  Key place{run.run_id, device, slot, 0};
  return Answered(ReadOnLink(id, place, AddressOf(x->untyped_data()), x->size_bytes(), stream,
                             others));
}

// What every handler is given first.
template <typename Binding>
auto Bound(Binding binding) {
  return std::move(binding)
      .template Ctx<ffi::RunId>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Attr<int64_t>("store")
      .template Attr<int64_t>("slot")
      .template Attr<bool>("others");
}

auto OnHost() { return Bound(ffi::Ffi::Bind()); }

auto OnGpu() { return Bound(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<Cuda::Stream>>()); }

}  // namespace
}  // namespace jdelta

JDELTA_EXPORT XLA_FFI_Error* jdelta_spill_write(XLA_FFI_CallFrame* frame);
JDELTA_EXPORT XLA_FFI_Error* jdelta_spill_read(XLA_FFI_CallFrame* frame);
JDELTA_EXPORT XLA_FFI_Error* jdelta_spill_write_cuda(XLA_FFI_CallFrame* frame);
JDELTA_EXPORT XLA_FFI_Error* jdelta_spill_read_cuda(XLA_FFI_CallFrame* frame);

#define JDELTA_WRITE(binding) \
  (binding).Arg<xla::ffi::AnyBuffer>().Arg<jdelta::Scalar>().Ret<jdelta::Scalar>()
#define JDELTA_READ(binding) \
  (binding).Arg<jdelta::Scalar>().Arg<jdelta::Scalar>().Ret<xla::ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdelta_spill_write, jdelta::Write, JDELTA_WRITE(jdelta::OnHost()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdelta_spill_read, jdelta::Read, JDELTA_READ(jdelta::OnHost()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdelta_spill_write_cuda, jdelta::WriteOnGpu,
                              JDELTA_WRITE(jdelta::OnGpu()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdelta_spill_read_cuda, jdelta::ReadOnGpu,
                              JDELTA_READ(jdelta::OnGpu()));
