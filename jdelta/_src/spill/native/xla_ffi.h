// XLA's FFI headers, declared at the version of the oldest jaxlib served.

#ifndef JDELTA_SPILL_XLA_FFI_H_
#define JDELTA_SPILL_XLA_FFI_H_

#include "xla/ffi/api/c_api.h"

// XLA refuses handlers that declare a later minor version than its own. The handlers use nothing
// that is newer than 0.3 (jaxlib 0.10), so one library, whatever headers built it, serves all.
static_assert(XLA_FFI_API_MAJOR == 0, "the handlers were written for version 0 of XLA's FFI");
#if XLA_FFI_API_MINOR > 3
#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 3
#endif

#include "xla/ffi/api/ffi.h"

#endif  // JDELTA_SPILL_XLA_FFI_H_
