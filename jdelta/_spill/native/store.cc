#include "store.h"

#include <cstring>
#include <thread>

namespace jdelta {

Store::Store(Options options) : options_(std::move(options)) {}
Store::~Store() = default;

std::optional<Status> Store::Write(const Key& key, const void* data, size_t bytes, Done) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_[key] = std::string(static_cast<const char*>(data), bytes);
  return Status();
}

std::optional<Status> Store::Read(const Key& key, void* data, size_t bytes, Done done) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = entries_.find(key);
  if (found == entries_.end()) return Status("no such entry");
  std::thread([data, bytes, kept = std::move(found->second), done = std::move(done)] {
    std::memcpy(data, kept.data(), bytes);
    done(Status());
  }).detach();
  entries_.erase(found);
  return std::nullopt;
}

}  // namespace jdelta
