// Which extents of the device are in use.

#ifndef JDELTA_SPILL_EXTENTS_H_
#define JDELTA_SPILL_EXTENTS_H_

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace jdelta {

// Gives out the lowest extent that is free, so that the file is as short as it can be.
class Extents {
 public:
  int64_t Take() {
    if (free_.empty()) return end_++;
    int64_t extent = free_.top();
    free_.pop();
    return extent;
  }

  void Put(int64_t extent) { free_.push(extent); }

 private:
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<int64_t>> free_;
  int64_t end_ = 0;
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_EXTENTS_H_
