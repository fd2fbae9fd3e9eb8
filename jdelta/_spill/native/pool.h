// The host memory that spilled tensors pass through.

#ifndef JDELTA_SPILL_POOL_H_
#define JDELTA_SPILL_POOL_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace jdelta {

// All blocks are of one size, so the pool cannot fragment; tensors are cut to it. One MiB is enough
// for a device to reach its full rate and small against tensors that are worth spilling.
constexpr size_t kBlockBytes = size_t{1} << 20;

// What direct I/O wants of addresses, lengths and offsets.
constexpr size_t kAlignment = 4096;

constexpr size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Unmap {
  void operator()(char* data) const { munmap(data, kBlockBytes); }
};

// Owns its memory, aligned to a page.
using Block = std::unique_ptr<char, Unmap>;

// A new block, or none when the system has no memory.
inline Block NewBlock() {
  void* data =
      mmap(nullptr, kBlockBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return Block(data == MAP_FAILED ? nullptr : static_cast<char*>(data));
}

// Never more than `most` blocks at once, nor more than the system has memory for; they are made when
// first needed. Not for several threads.
class Pool {
 public:
  explicit Pool(size_t most) : most_(most) {}

  // None when all are in use.
  Block Take() {
    if (!free_.empty()) {
      Block block = std::move(free_.back());
      free_.pop_back();
      return block;
    }
    if (made_ == most_) return nullptr;
    Block block = NewBlock();
    block == nullptr ? most_ = made_ : ++made_;
    return block;
  }

  bool any() const { return !free_.empty() || made_ < most_; }

  void Put(Block block) { free_.push_back(std::move(block)); }

  size_t most() const { return most_; }
  size_t made() const { return made_; }

 private:
  size_t most_;
  size_t made_ = 0;
  std::vector<Block> free_;
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_POOL_H_
