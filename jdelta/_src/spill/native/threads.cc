// What the threads of a store do: move blocks to the device and back.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "completer.h"
#include "store.h"

namespace jdelta {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);

// What a step computes goes first: a block that waits is in memory, and when nothing is computed
// for want of one there is a processor to move it. Only Linux knows this of a single thread.
void GiveWay() {
#if defined(__linux__)
  [[maybe_unused]] int ignored = nice(10);
#endif
}

}  // namespace

// Starts those that are missing. Two transfers at once each way keep a device busy.
void Store::StartThreads() {
  constexpr void (Store::*kLoops[])(Lock&) = {&Store::WriteLoop, &Store::ReadLoop,
                                              &Store::WriteLoop, &Store::ReadLoop,
                                              &Store::WatchLoop};
  for (; threads_ < static_cast<int>(std::size(kLoops)); ++threads_) {
    PrepareToComplete();
    std::thread([self = shared_from_this(), loop = kLoops[threads_]] {
      GiveWay();
      Lock lock(self->mutex_);
      (self.get()->*loop)(lock);
      --self->threads_;
      self->ended_.notify_all();
    }).detach();
  }
}

bool Store::Close() {
  if (!Usable().empty()) return true;
  Lock lock(mutex_);
  closed_ = true;
  FailAll("the store of this step was closed while the step ran");
  Wake();
  return ended_.wait_for(lock, kPatience, [this] { return threads_ == 0; });
}

void Store::WriteLoop(Lock& lock) {
  while (true) {
    auto fillable = [this] { return !fills_.empty() && wanting_ == 0 && AnyBlock(); };
    to_write_.wait(lock, [&] { return closed_ || !writes_.empty() || fillable(); });
    if (closed_) return;
    Block block = nullptr;
    if (fillable() && !TakeFor(fills_.front().entry->key.run, &block)) {
      fills_.pop_front();
    } else if (block != nullptr) {
      Fill(lock, std::move(block));
    } else if (!writes_.empty()) {
      Send(lock);
    }
    Wake();
  }
}

void Store::ReadLoop(Lock& lock) {
  while (true) {
    to_read_.wait(lock, [this] { return closed_ || !asked_.empty() || AheadCanGo(); });
    if (closed_) return;
    asked_.empty() ? FetchAhead(lock) : FetchAsked(lock);
    Wake();
  }
}

bool Store::Busy() const { return writing_.transfers + reading_.transfers > 0; }

bool Store::Settled() const { return fills_.empty() && writes_.empty() && !Busy(); }

// Wakes those who may have something to do now, and no others: a switch of threads costs about as
// much as copying some tens of KiB. To be called after each change that somebody may wait for.
void Store::Wake() {
  if (closed_ || !writes_.empty() || !fills_.empty()) to_write_.notify_all();
  if (closed_ || !asked_.empty() || wanting_ > 0 || AheadCanGo()) to_read_.notify_all();
  if (closed_ || Settled()) settled_.notify_all();
  if (closed_) ended_.notify_all();
}

// Ends every execution when the device has not answered for too long.
void Store::WatchLoop(Lock& lock) {
  std::chrono::duration<double> timeout(options_.timeout);
  auto period = std::min<std::chrono::duration<double>>(timeout / 4, std::chrono::seconds(5));
  while (!closed_) {
    ended_.wait_for(lock, period);
    if (Busy() && Clock::now() - answered_ > timeout) {
      FailAll(options_.place + " has not answered for " + std::to_string(options_.timeout) +
              " seconds (timeout=); see the system's log, and try another directory");
    }
  }
}

void Store::Fill(Lock& lock, Block block) {
  Job job = std::move(fills_.front());
  fills_.pop_front();
  Entry& entry = *job.entry;
  if (entry.dropped) {
    pool_.Put(std::move(block));
    return;
  }
  Status status = CopyChunkIn(lock, job, std::move(block));
  if (status.empty() && entry.left == 0) Answer(entry, status);
  AnswerDropped(entry);
}

void Store::Send(Lock& lock) {
  Job job = std::move(writes_.front());
  writes_.pop_front();
  Chunk& chunk = job.chunk();
  if (chunk.state != Chunk::State::kQueued) return;  // read before it left, or dropped
  chunk.state = Chunk::State::kWriting;
  Status status = Transfer(lock, job, true);
  if (status.empty()) counters_.written += chunk.bytes;
  chunk.state = Chunk::State::kHeld;
  if (chunk.taken || (job.entry->dropped && !chunk.copying)) {
    Release(chunk);
  } else if (status.empty() && !chunk.copying) {
    held_.emplace(chunk.order, job);
  }
  if (!status.empty()) Fail(job.entry->key.run, status);
}

void Store::FetchAsked(Lock& lock) {
  Job job = std::move(asked_.front());
  asked_.pop_front();
  Block block;
  ++wanting_;
  while (job.chunk().state == Chunk::State::kStored && !closed_ && block == nullptr) {
    if (!TakeFor(job.entry->key.run, &block)) break;
    if (block == nullptr) to_read_.wait(lock);
  }
  --wanting_;
  if (block != nullptr) Fetch(lock, job, std::move(block));
}

// Whether something is to be brought ahead, and there is memory for it.
bool Store::AheadCanGo() {
  while (!ahead_.empty()) {
    const Chunk& chunk = ahead_.front().chunk();
    if (chunk.ahead && chunk.state == Chunk::State::kStored) return AnyBlock(chunk.order);
    ahead_.pop_front();  // asked for meanwhile, or dropped
  }
  return false;
}

void Store::FetchAhead(Lock& lock) {
  Job job = std::move(ahead_.front());
  ahead_.pop_front();
  Block block = TakeBlock(job.chunk().order);
  if (block == nullptr) {  // the system has no memory
    job.chunk().ahead = false;
    return;
  }
  Fetch(lock, job, std::move(block));
}

void Store::Fetch(Lock& lock, const Job& job, Block block) {
  Chunk& chunk = job.chunk();
  chunk.block = std::move(block);
  chunk.state = Chunk::State::kLoading;
  chunk.loaded = true;
  Status status = Transfer(lock, job, false);
  if (status.empty()) {
    counters_.read += chunk.bytes;
    counters_.ahead += chunk.ahead ? chunk.bytes : 0;
  }
  if (job.entry->dropped) {
    Release(chunk);
  } else if (!status.empty()) {
    chunk.state = Chunk::State::kHeld;
    Fail(job.entry->key.run, status);
  } else if (job.entry->target != nullptr) {
    Deliver(lock, job);
  } else {
    chunk.state = Chunk::State::kHeld;
    held_.emplace(chunk.order, job);
  }
}

// Copies a block that was read to the tensor that waits for it.
void Store::Deliver(Lock& lock, const Job& job) {
  Entry& entry = *job.entry;
  Chunk& chunk = job.chunk();
  ++entry.touching;
  lock.unlock();
  Status status = CopyChunkOut(chunk);
  lock.lock();
  --entry.touching;
  Release(chunk);
  if (!status.empty()) Fail(entry.key.run, status);
  if (!entry.dropped && --entry.left == 0) {
    Leave(entry);
    PlanAhead(entry.key);
    Answer(entry, Status());
  }
  AnswerDropped(entry);
}

// Lets go of the lock meanwhile.
Status Store::Transfer(Lock& lock, const Job& job, bool write) {
  Traffic& traffic = write ? writing_ : reading_;
  Clock::time_point now = Clock::now();
  if (!Busy()) answered_ = now;
  if (traffic.transfers++ == 0) traffic.since = now;
  Wake();
  lock.unlock();
  Chunk& chunk = job.chunk();
  Status status = write ? WriteChunk(chunk)
                        : adapter_->Read(chunk.extent, chunk.block, chunk.bytes);
  lock.lock();
  answered_ = Clock::now();
  if (--traffic.transfers == 0) {
    std::chrono::nanoseconds time = answered_ - traffic.since;
    (write ? counters_.writing : counters_.reading) += time.count();
  }
  if (status.empty()) return status;
  return (write ? "writing to " : "reading from ") + options_.place + ": " + status;
}

Status Store::WriteChunk(const Chunk& chunk) {
  std::memset(chunk.block.get() + chunk.bytes, 0, Aligned(chunk.bytes) - chunk.bytes);
  return adapter_->Write(chunk.extent, chunk.block, chunk.bytes);
}

}  // namespace jdelta
