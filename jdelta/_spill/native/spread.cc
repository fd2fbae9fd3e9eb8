#include "spread.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace jdelta {
namespace {

// Outlives the call: a thread may begin when nothing is left to do.
class Shared {
 public:
  Shared(size_t count, const Work& work) : count_(count), left_(count), work_(work) {}

  void Help() {
    for (size_t i = next_++; i < count_; i = next_++) {
      work_(i);  // the caller waits for this one, so its work is still there
      std::lock_guard<std::mutex> lock(mutex_);
      if (--left_ == 0) done_.notify_all();
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  const size_t count_;
  size_t left_;
  const Work& work_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable done_;
};

}  // namespace

void OneAfterTheOther(size_t count, const Work& work) {
  for (size_t i = 0; i < count; ++i) work(i);
}

void Share(size_t count, const Work& work, size_t others,
           const std::function<void(std::function<void()>)>& schedule) {
  if (count == 0) return;
  auto shared = std::make_shared<Shared>(count, work);
  for (size_t i = 0; i < std::min(others, count - 1); ++i) {
    schedule([shared] { shared->Help(); });
  }
  shared->Help();
  shared->Wait();
}

}  // namespace jdelta
