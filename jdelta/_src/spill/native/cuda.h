// The functions of NVIDIA's driver that are needed here, found when a program on a GPU first asks
// for them: nothing of CUDA is needed to build this library, nor to load it.

#ifndef JDELTA_SPILL_CUDA_H_
#define JDELTA_SPILL_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace jdelta {

// As in the driver's interface, where zero means success.
struct Cuda {
  using Address = uint64_t;  // of memory on a GPU
  using Context = void*;
  using Event = void*;
  using Stream = void*;

  int (*get_error_string)(int error, const char** text);
  int (*ctx_push_current)(Context context);
  int (*ctx_pop_current)(Context* context);
  int (*stream_get_ctx)(Stream stream, Context* context);
  int (*event_create)(Event* event, unsigned flags);
  int (*event_destroy)(Event event);
  int (*event_record)(Event event, Stream stream);
  int (*event_synchronize)(Event event);
  int (*mem_host_alloc)(void** memory, size_t bytes, unsigned flags);
  int (*mem_free_host)(void* memory);
  int (*memcpy_dtoh_async)(void* to, Address from, size_t bytes, Stream stream);
  int (*memcpy_htod_async)(Address to, const void* from, size_t bytes, Stream stream);
  int (*memset_async)(Address data, unsigned char byte, size_t bytes, Stream stream);

  // What went wrong; empty for success.
  Status Explain(int error) const;
};

// The driver of this machine; none, and why, where there is no driver.
const Cuda* FindCuda(Status* why);

// Makes a context current for as long as it lives.
class Current {
 public:
  Current(const Cuda& cuda, Cuda::Context context) : cuda_(cuda) { cuda.ctx_push_current(context); }
  ~Current() {
    Cuda::Context popped;
    cuda_.ctx_pop_current(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Cuda& cuda_;
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_CUDA_H_
