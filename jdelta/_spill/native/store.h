// Where spilled tensors are between the write of the forward pass and the read of the backward pass.

#ifndef JDELTA_SPILL_STORE_H_
#define JDELTA_SPILL_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

namespace jdelta {

// Empty when all went well, else what went wrong and what to do about it.
using Status = std::string;
using Done = std::function<void(const Status&)>;

// One tensor of one execution of a program on one of its devices.
struct Key {
  int64_t run;
  int64_t device;
  int64_t slot;
  int64_t row;
  bool operator<(const Key& other) const {
    return std::tie(run, device, slot, row) <
           std::tie(other.run, other.device, other.slot, other.row);
  }
};

struct Options {
  std::string path;
};

class Store {
 public:
  explicit Store(Options options);
  ~Store();

  // Both answer at once, or answer nothing and call `done` later; until then the memory is in use.
  std::optional<Status> Write(const Key& key, const void* data, size_t bytes, Done done);
  std::optional<Status> Read(const Key& key, void* data, size_t bytes, Done done);

 private:
  Options options_;
  std::mutex mutex_;
  std::map<Key, std::string> entries_;
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_STORE_H_
