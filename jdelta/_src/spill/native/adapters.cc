#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "adapter.h"

namespace jdelta {
namespace {

class MemoryAdapter : public Adapter {
 public:
  Status Write(int64_t extent, const Block& block, size_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (static_cast<size_t>(extent) >= kept_.size()) kept_.resize(extent + 1);
    Spare(std::move(kept_[extent]));
    kept_[extent] = block;
    return Status();
  }

  Status Read(int64_t extent, Block& block, size_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    Spare(std::move(block));
    block = kept_[extent];
    return Status();
  }

  // New memory would have to be found page by page, which takes longer than to fill it.
  Block Instead() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return NewBlock();
    Block block = std::move(spare_.back());
    spare_.pop_back();
    return block;
  }

 private:
  void Spare(Block block) {
    if (block.use_count() == 1) spare_.push_back(std::move(block));
  }

  std::mutex mutex_;
  std::vector<Block> kept_;   // by extent
  std::vector<Block> spare_;  // that nobody else has
};

class ForeignAdapter : public Adapter {
 public:
  ForeignAdapter(Transfer write, Transfer read) : write_(write), read_(read) {}

  Status Write(int64_t extent, const Block& block, size_t bytes) override {
    return Call(write_, extent, block.get(), bytes);
  }

  Status Read(int64_t extent, Block& block, size_t bytes) override {
    return Call(read_, extent, block.get(), bytes);
  }

 private:
  Status Call(Transfer transfer, int64_t extent, char* data, size_t bytes) {
    char message[512] = "";
    int error = transfer(extent * static_cast<int64_t>(kBlockBytes), data,
                         static_cast<int64_t>(bytes), message, sizeof(message));
    if (error == 0) return Status();
    return error > 0 ? Explain(error) : Status(message);
  }

  Transfer write_;
  Transfer read_;
};

// Hands out time on a line that carries so many bytes a second.
class Line {
 public:
  explicit Line(double rate) : rate_(rate) {}

  void Pass(size_t bytes) {
    if (rate_ <= 0) return;
    std::unique_lock<std::mutex> lock(mutex_);
    free_ = std::max(free_, Clock::now()) +
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bytes / rate_));
    auto until = free_;
    lock.unlock();
    std::this_thread::sleep_until(until);
  }

 private:
  using Clock = std::chrono::steady_clock;
  double rate_;
  std::mutex mutex_;
  Clock::time_point free_;
};

class ThrottledAdapter : public Adapter {
 public:
  ThrottledAdapter(std::unique_ptr<Adapter> adapter, double write, double read)
      : adapter_(std::move(adapter)), write_(write), read_(read) {}

  Status Write(int64_t extent, const Block& block, size_t bytes) override {
    write_.Pass(bytes);
    return adapter_->Write(extent, block, bytes);
  }

  Status Read(int64_t extent, Block& block, size_t bytes) override {
    read_.Pass(bytes);
    return adapter_->Read(extent, block, bytes);
  }

  Block Instead() override { return adapter_->Instead(); }

 private:
  std::unique_ptr<Adapter> adapter_;
  Line write_;
  Line read_;
};

}  // namespace

std::unique_ptr<Adapter> NewMemoryAdapter() { return std::make_unique<MemoryAdapter>(); }

std::unique_ptr<Adapter> NewForeignAdapter(Transfer write, Transfer read) {
  return std::make_unique<ForeignAdapter>(write, read);
}

std::unique_ptr<Adapter> Throttled(std::unique_ptr<Adapter> adapter, double write, double read) {
  if (write <= 0 && read <= 0) return adapter;
  return std::make_unique<ThrottledAdapter>(std::move(adapter), write, read);
}

}  // namespace jdelta
