// One spilled tensor, cut to blocks.

#ifndef JDELTA_SPILL_ENTRY_H_
#define JDELTA_SPILL_ENTRY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "pool.h"
#include "status.h"
#include "summed_copy.h"

namespace jdelta {

using Done = std::function<void(const Status&)>;

// One tensor of one execution of a program on one of its devices.
struct Key {
  int64_t run;
  int64_t device;
  int64_t slot;
  int64_t row;

  bool operator<(const Key& other) const { return Tie() < other.Tie(); }
  std::tuple<int64_t, int64_t, int64_t, int64_t> Tie() const { return {run, device, slot, row}; }
};

struct Entry;

// At most a block of a tensor.
struct Chunk {
  enum class State {
    kEmpty,    // of a write that waits for a block
    kFilling,  // is being copied from the tensor
    kQueued,   // in memory, waits for the device
    kWriting,  // in memory, on its way to the device
    kHeld,     // in memory; the device has it, or need not have it any more
    kStored,   // on the device only
    kLoading,  // on its way back
    kGone,     // given back or dropped
  };

  Entry* entry;
  size_t offset;          // in the tensor
  size_t bytes;
  uint64_t order;         // of writing; reads come in the reverse order
  int64_t extent;         // where on the device; reserved when the write begins
  State state = State::kEmpty;
  Block block = nullptr;  // from kFilling to kHeld, and in kLoading
  Sums sums{};            // of the tensor's bytes, since kFilling
  bool copying = false;   // to the tensor that is read, by the thread that asked for it
  bool taken = false;     // that copy has ended, but the device still writes
  bool ahead = false;     // is to be, or is, brought back before it is asked for
  bool loaded = false;    // was brought back
};

struct Entry {
  Key key;
  size_t bytes;
  uint64_t order;  // of writing
  std::vector<Chunk> chunks;

  // The operation that goes on: a write until all is copied, later a read until all is given back.
  const char* source = nullptr;
  char* target = nullptr;
  size_t left = 0;         // chunks that it still has to copy
  int touching = 0;        // threads that copy at this moment
  Done done = nullptr;     // set when the operation could not end at once
  bool dropped = false;    // its execution has failed or is over
  Status error;            // then: why
};

// A job of the store's threads. The tensor stays alive until it is over.
struct Job {
  std::shared_ptr<Entry> entry;
  size_t index;
  Chunk& chunk() const { return entry->chunks[index]; }
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_ENTRY_H_
