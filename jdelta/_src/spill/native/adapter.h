// What a store writes to and reads from, in extents of one block each.

#ifndef JDELTA_SPILL_ADAPTER_H_
#define JDELTA_SPILL_ADAPTER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "pool.h"
#include "status.h"

namespace jdelta {

// Called by several threads at once, never for the same extent.
class Adapter {
 public:
  virtual ~Adapter() = default;

  // Moves `bytes`, up to the next alignment. Writing may keep the block; reading may give another in
  // its place.
  virtual Status Write(int64_t extent, const Block& block, size_t bytes) = 0;
  virtual Status Read(int64_t extent, Block& block, size_t bytes) = 0;

  // For the blocks that it has kept; none when the system has no memory.
  virtual Block Instead() { return NewBlock(); }
};

// Reads and writes a file, past the page cache where its file system allows. Takes the descriptor.
std::unique_ptr<Adapter> NewDiskAdapter(int file);

// Keeps in memory what it is given: the blocks themselves, since a device moves data without the
// processor's time.
std::unique_ptr<Adapter> NewMemoryAdapter();

// Calls functions that return zero, or else an error number, or -1 and a text in `message`.
using Transfer = int (*)(int64_t offset, void* data, int64_t bytes, char* message, int64_t size);
std::unique_ptr<Adapter> NewForeignAdapter(Transfer write, Transfer read);

// Makes `adapter` as slow as given rates, bytes a second, by sleeping; zero leaves one as it is.
std::unique_ptr<Adapter> Throttled(std::unique_ptr<Adapter> adapter, double write, double read);

// Text of an error number, and what to do about it.
Status Explain(int error);

}  // namespace jdelta

#endif  // JDELTA_SPILL_ADAPTER_H_
