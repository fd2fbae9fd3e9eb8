#include "cuda.h"

#include <dlfcn.h>

namespace jdelta {
namespace {

struct Found {
  Cuda cuda{};
  Status why;
};

template <typename Function>
void Find(void* library, const char* name, Function& function, Status& why) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) why = std::string("the CUDA driver is too old, it has no ") + name;
}

Found Load() {
  Found found;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.why = std::string("there is no CUDA driver: ") + dlerror();
    return found;
  }
  Cuda& cuda = found.cuda;
  Find(library, "cuGetErrorString", cuda.get_error_string, found.why);
  Find(library, "cuCtxPushCurrent_v2", cuda.ctx_push_current, found.why);
  Find(library, "cuCtxPopCurrent_v2", cuda.ctx_pop_current, found.why);
  Find(library, "cuStreamGetCtx", cuda.stream_get_ctx, found.why);
  Find(library, "cuEventCreate", cuda.event_create, found.why);
  Find(library, "cuEventDestroy_v2", cuda.event_destroy, found.why);
  Find(library, "cuEventRecord", cuda.event_record, found.why);
  Find(library, "cuEventSynchronize", cuda.event_synchronize, found.why);
  Find(library, "cuMemHostAlloc", cuda.mem_host_alloc, found.why);
  Find(library, "cuMemFreeHost", cuda.mem_free_host, found.why);
  Find(library, "cuMemcpyDtoHAsync_v2", cuda.memcpy_dtoh_async, found.why);
  Find(library, "cuMemcpyHtoDAsync_v2", cuda.memcpy_htod_async, found.why);
  Find(library, "cuMemsetD8Async", cuda.memset_async, found.why);
  return found;
}

}  // namespace

Status Cuda::Explain(int error) const {
  if (error == 0) return Status();
  const char* text = nullptr;
  get_error_string(error, &text);
  return "CUDA error " + std::to_string(error) + (text ? std::string(": ") + text : "");
}

const Cuda* FindCuda(Status* why) {
  static const Found found = Load();
  *why = found.why;
  return found.why.empty() ? &found.cuda : nullptr;
}

}  // namespace jdelta
