// How native code says what went wrong.

#ifndef JDELTA_SPILL_STATUS_H_
#define JDELTA_SPILL_STATUS_H_

#include <string>

namespace jdelta {

// Empty when all went well, else what went wrong and what to do about it.
using Status = std::string;

// Of an operation of a step whose store is gone.
inline const char* const kClosed = "the store of this step is closed; plan the step again";

}  // namespace jdelta

#endif  // JDELTA_SPILL_STATUS_H_
