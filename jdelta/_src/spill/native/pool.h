// The host memory that spilled tensors pass through.

#ifndef JDELTA_SPILL_POOL_H_
#define JDELTA_SPILL_POOL_H_

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace jdelta {

// All blocks are of one size, so the pool cannot fragment; tensors are cut to it. One MiB is enough
// for a device to reach its full rate and small against tensors that are worth spilling.
constexpr size_t kBlockBytes = size_t{1} << 20;

// What direct I/O wants of addresses, lengths and offsets.
constexpr size_t kAlignment = 4096;

constexpr size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Memory aligned to a page. A device that is memory itself may have it too: what two have is not
// written to any more.
using Block = std::shared_ptr<char>;

// A new block, or none when the system has no memory.
inline Block NewBlock() {
  void* data =
      mmap(nullptr, kBlockBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  return Block(static_cast<char*>(data), [](char* block) { munmap(block, kBlockBytes); });
}

// Never more than `most` blocks at once, nor more than `make` had memory for; they are made when
// needed. While there are none, the next one is tried for each time. Not for several threads.
class Pool {
 public:
  Pool(size_t most, std::function<Block()> make) : most_(most), make_(std::move(make)) {}

  // None when all are in use.
  Block Take() {
    if (!free_.empty()) {
      Block block = std::move(free_.back());
      free_.pop_back();
      return block;
    }
    if (made_ > 0 && made_ == most_) return nullptr;
    Block block = make_();
    if (block != nullptr) ++made_;
    most_ = block == nullptr ? made_ : std::max(most_, made_);
    return block;
  }

  // Whether it is worth a try.
  bool any() const { return !free_.empty() || made_ < most_ || made_ == 0; }

  void Put(Block block) {
    if (block.use_count() > 1) {  // the device's from now on
      --made_;
    } else {
      free_.push_back(std::move(block));
    }
  }

  size_t most() const { return most_; }
  size_t made() const { return made_; }

 private:
  size_t most_;
  std::function<Block()> make_;
  size_t made_ = 0;
  std::vector<Block> free_;
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_POOL_H_
