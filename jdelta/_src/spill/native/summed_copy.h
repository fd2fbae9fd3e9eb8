// The one way in which tensors are copied here: past the cache, with a checksum on the way.

#ifndef JDELTA_SPILL_SUMMED_COPY_H_
#define JDELTA_SPILL_SUMMED_COPY_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace jdelta {

// The checksum: Fletcher's sums (a, b, c, d: ZFS's fletcher4) of each of the four streams that every
// fourth 32-bit word makes, in the order in which they are copied (of each 16 KiB 64 bytes of each of
// its four pages, then the next 64, each page beginning a quarter on from the one before; of less as
// they stand), the last one filled up with zeros. In this order: of streams 0 and 2 both a, both b,
// both c and both d, then of streams 1 and 3. In a block a change of one word, or of two of one
// stream, is found for certain.
using Sums = std::array<uint64_t, 16>;

// Takes any addresses, and saves a third of the memory traffic where `to` is a multiple of 16.
// Another thread finds the copy there once it knows of it in any of the usual ways.
Sums SummedCopy(char* to, const char* from, size_t bytes);

}  // namespace jdelta

#endif  // JDELTA_SPILL_SUMMED_COPY_H_
