#include "link.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "waiter.h"

namespace jdelta {
namespace {

// Long enough for the link to reach its full rate.
constexpr size_t kBufferBytes = size_t{16} << 20;

// More than any tensor has.
constexpr int64_t kParts = int64_t{1} << 24;

constexpr size_t kRuns = 40;
constexpr auto kPatience = std::chrono::seconds(5);

// Flags of the driver's interface.
constexpr unsigned kPortable = 1;          // pinned for all contexts
constexpr unsigned kBlockingNoTiming = 3;  // who waits for an event sleeps

Key PartOf(const Key& tensor, size_t offset) {
  Key part = tensor;
  part.row = tensor.row * kParts + static_cast<int64_t>(offset / kBufferBytes);
  return part;
}

}  // namespace

Link::Link(std::shared_ptr<Store> store, const Cuda& cuda, Cuda::Context context, size_t buffers)
    : store_(std::move(store)), cuda_(cuda), context_(context), most_(buffers) {}

Status Link::Write(const Key& place, Cuda::Address data, size_t bytes, Cuda::Stream stream) {
  Current current(cuda_, context_);
  Lock lock(mutex_);
  Key tensor = place;
  tensor.row = rows_[place.run][place.slot]++;
  if (rows_.size() > kRuns) rows_.erase(rows_.begin());  // runs have rising numbers
  for (size_t offset = 0; offset < bytes; offset += kBufferBytes) {
    size_t size = std::min(kBufferBytes, bytes - offset);
    Status status = Send(lock, PartOf(tensor, offset), data + offset, size, stream);
    if (!status.empty()) return store_->FailRun(place.run, status);
  }
  return Status();
}

Status Link::Read(const Key& place, Cuda::Address data, size_t bytes, Cuda::Stream stream) {
  Current current(cuda_, context_);
  Lock lock(mutex_);
  int64_t& rows = rows_[place.run][place.slot];
  if (rows == 0) {
    return store_->FailRun(place.run, "slot " + std::to_string(place.slot) +
                                          " is read but not there: it is read twice, or was not "
                                          "written in this execution");
  }
  Key tensor = place;
  tensor.row = --rows;
  // The last part first, as the store brings them back.
  for (size_t end = bytes; end > 0;) {
    size_t offset = (end - 1) / kBufferBytes * kBufferBytes;
    Status status = Fetch(lock, PartOf(tensor, offset), data + offset, end - offset, stream);
    if (!status.empty()) return store_->FailRun(place.run, status);
    end = offset;
  }
  return Status();
}

Status Link::Send(Lock& lock, const Key& part, Cuda::Address from, size_t bytes,
                  Cuda::Stream stream) {
  Buffer* buffer = nullptr;
  if (Status status = Take(lock, &buffer); !status.empty()) return status;
  int error = cuda_.memcpy_dtoh_async(buffer->memory, from, bytes, stream);
  if (error == 0) error = cuda_.event_record(buffer->event, stream);
  if (error != 0) {
    Free(buffer);
    return cuda_.Explain(error);
  }
  parts_[part] = Part{buffer, bytes, false};
  copies_.push_back(Copy{buffer, true, part, bytes});
  changed_.notify_all();
  return Status();
}

Status Link::Fetch(Lock& lock, const Key& part, Cuda::Address to, size_t bytes,
                   Cuda::Stream stream) {
  Buffer* buffer = nullptr;
  Status status = Find(lock, part, bytes, &buffer);
  if (buffer == nullptr) return status;
  if (status.empty()) {
    int error = cuda_.memcpy_htod_async(to, buffer->memory, bytes, stream);
    if (error == 0) error = cuda_.event_record(buffer->event, stream);
    status = cuda_.Explain(error);
  }
  copies_.push_back(Copy{buffer, false, part, bytes});
  changed_.notify_all();
  return status;
}

// A buffer with the part, from the store if it is there already; it is the caller's to free.
Status Link::Find(Lock& lock, const Key& part, size_t bytes, Buffer** buffer) {
  auto found = parts_.find(part);
  while (found != parts_.end() && found->second.storing) {
    changed_.wait(lock);
    found = parts_.find(part);
  }
  if (found != parts_.end()) {
    *buffer = found->second.buffer;
    bool whole = found->second.bytes == bytes;
    parts_.erase(found);
    return whole ? store_->Forward(part.run, bytes) : "a part is read with other bytes";
  }
  Buffer* taken = nullptr;
  if (Status status = Take(lock, &taken); !status.empty()) return status;
  lock.unlock();
  Waiter waiter;
  Status status = waiter.Wait(store_->Read(part, taken->memory, bytes, waiter.done()));
  lock.lock();
  if (status.empty()) {
    *buffer = taken;
  } else {
    Free(taken);
  }
  return status;
}

// A free buffer, of which there are more as soon as the GPU or the store gets on.
Status Link::Take(Lock& lock, Buffer** buffer) {
  while (free_.empty()) {
    if (closed_) return kClosed;
    if (buffers_.size() < most_) {
      Status status = NewBuffer();
      if (!status.empty() && buffers_.empty()) return "no pinned host memory: " + status;
      if (!status.empty()) most_ = buffers_.size();
    } else {
      changed_.wait(lock);
    }
  }
  *buffer = free_.back();
  free_.pop_back();
  if (!following_) {
    following_ = true;
    std::thread([self = shared_from_this()] {
      Lock lock(self->mutex_);
      self->Follow(lock);
      self->following_ = false;
      self->changed_.notify_all();
    }).detach();
  }
  return Status();
}

Status Link::NewBuffer() {
  void* memory = nullptr;
  auto buffer = std::make_unique<Buffer>();
  if (int error = cuda_.mem_host_alloc(&memory, kBufferBytes, kPortable)) {
    return cuda_.Explain(error);
  }
  if (int error = cuda_.event_create(&buffer->event, kBlockingNoTiming)) {
    cuda_.mem_free_host(memory);
    return cuda_.Explain(error);
  }
  buffer->memory = static_cast<char*>(memory);
  free_.push_back(buffer.get());
  buffers_.push_back(std::move(buffer));
  return Status();
}

void Link::Follow(Lock& lock) {
  Current current(cuda_, context_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !copies_.empty(); });
    if (copies_.empty()) return;
    Copy copy = copies_.front();
    copies_.pop_front();
    lock.unlock();
    Status status = cuda_.Explain(cuda_.event_synchronize(copy.buffer->event));
    lock.lock();
    if (copy.leaving) {
      Arrive(lock, copy, status);
    } else {
      if (!status.empty()) store_->FailRun(copy.part.run, status);
      Free(copy.buffer);
    }
  }
}

// Hands a part that has come from the GPU to the store, if it was not read meanwhile.
void Link::Arrive(Lock& lock, const Copy& copy, const Status& status) {
  auto found = parts_.find(copy.part);
  if (found == parts_.end() || found->second.buffer != copy.buffer) return;
  found->second.storing = true;
  Done done = [self = shared_from_this(), copy](const Status&) {  // an error waits in the store
    Lock lock(self->mutex_);
    self->parts_.erase(copy.part);
    self->Free(copy.buffer);
  };
  lock.unlock();
  std::optional<Status> answer =
      status.empty() ? store_->Write(copy.part, copy.buffer->memory, copy.bytes, done)
                     : store_->FailRun(copy.part.run, status);
  if (answer.has_value()) done(*answer);
  lock.lock();
}

void Link::Free(Buffer* buffer) {
  free_.push_back(buffer);
  changed_.notify_all();
}

void Link::Close() {
  Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  bool ended = changed_.wait_for(lock, kPatience, [this] {
    return !following_ && free_.size() == buffers_.size();
  });
  if (!ended) return;  // the GPU, or the store, still has some of the memory
  Current current(cuda_, context_);
  for (const auto& buffer : buffers_) {
    cuda_.event_destroy(buffer->event);
    cuda_.mem_free_host(buffer->memory);
  }
  free_.clear();
  buffers_.clear();
}

}  // namespace jdelta
