// A fast 64-bit checksum.

#ifndef JDELTA_SPILL_CHECKSUM_H_
#define JDELTA_SPILL_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace jdelta {

// XXH64 of the published specification, seed 0.
uint64_t Checksum(const void* data, size_t bytes);

}  // namespace jdelta

#endif  // JDELTA_SPILL_CHECKSUM_H_
