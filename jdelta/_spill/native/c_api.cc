// What Python calls through ctypes.

#include <cstdint>
#include <memory>

#include "registry.h"

#define JDELTA_EXPORT extern "C" __attribute__((visibility("default")))

JDELTA_EXPORT int64_t jdelta_spill_open(const char* path) {
  return jdelta::RegisterStore(std::make_shared<jdelta::Store>(jdelta::Options{path}));
}

JDELTA_EXPORT void jdelta_spill_close(int64_t id) { jdelta::ForgetStore(id); }
