#include "completer.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jdelta {
namespace {

constexpr auto kIdle = std::chrono::seconds(5);

// As in XLA's own threads: otherwise what is computed here would differ in its last bits.
void FlushDenormals() {
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | (uint64_t{1} << 24)));
#endif
}

// As many threads as there is work at once; they end when nothing came for a while. One more starts
// them, since a thread has the priority of the one that starts it.
class Completer {
 public:
  Completer() {
    std::thread([this] { StartOthers(); }).detach();
  }

  void Add(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    if (work_.size() > idle_) {
      ++missing_;
      start_.notify_one();
    } else {
      more_.notify_one();
    }
  }

 private:
  void StartOthers() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      start_.wait(lock, [this] { return missing_ > 0; });
      --missing_;
      std::thread([this] { Run(); }).detach();
    }
  }

  void Run() {
    FlushDenormals();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      bool any = more_.wait_for(lock, kIdle, [this] { return !work_.empty(); });
      --idle_;
      if (!any) return;
      std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::condition_variable start_;
  std::deque<std::function<void()>> work_;
  size_t idle_ = 0;
  size_t missing_ = 0;  // threads that are to be started
};

// Its threads may outlive the end of main; a forked process has none of its parent's.
Completer& TheCompleter() {
  static std::mutex mutex;
  static Completer* completer;
  static pid_t process;
  std::lock_guard<std::mutex> lock(mutex);
  if (process != getpid()) {
    process = getpid();
    completer = new Completer;
  }
  return *completer;
}

}  // namespace

void PrepareToComplete() { TheCompleter(); }

void Complete(std::function<void()> work) { TheCompleter().Add(std::move(work)); }

}  // namespace jdelta
