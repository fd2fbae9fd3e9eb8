// Waits for an operation that may answer later.

#ifndef JDELTA_SPILL_WAITER_H_
#define JDELTA_SPILL_WAITER_H_

#include <condition_variable>
#include <mutex>
#include <optional>

#include "entry.h"
#include "status.h"

namespace jdelta {

// Where an operation's answer goes. Must live until it has come.
class Waiter {
 public:
  Done done() {
    return [this](const Status& status) {
      std::lock_guard<std::mutex> lock(mutex_);
      status_ = status;
      answered_.notify_all();
    };
  }

  // The answer: `status` if it was given at once.
  Status Wait(std::optional<Status> status) {
    if (status.has_value()) return *status;
    std::unique_lock<std::mutex> lock(mutex_);
    answered_.wait(lock, [this] { return status_.has_value(); });
    return *status_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable answered_;
  std::optional<Status> status_;
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_WAITER_H_
