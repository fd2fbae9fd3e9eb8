// How tensors leave the store: given back, or dropped with the execution they belong to.

#include <utility>

#include "completer.h"
#include "store.h"

namespace jdelta {
namespace {

// XLA's CPU client has at most 32 executions in flight on a device; older ones have ended.
constexpr size_t kRuns = 40;

}  // namespace

// Ends an execution. Answers with what ended it, which may be something earlier.
Status Store::Fail(int64_t id, const Status& status) {
  Run& run = Begin(id);
  if (!run.error.empty()) return run.error;
  run.error = status;
  ++counters_.failures;
  std::map<int64_t, Lane> lanes = std::move(run.lanes);
  run.lanes.clear();
  for (auto& [device, lane] : lanes) {
    for (auto& [order, entry] : lane) Drop(entry, status);
  }
  Wake();
  return status;
}

Status Store::FailRun(int64_t run, const Status& status) {
  if (Status unusable = Usable(); !unusable.empty()) return unusable;
  Lock lock(mutex_);
  return closed_ ? Status(kClosed) : Fail(run, status);
}

void Store::Defer(int64_t run, const Status& status) {
  if (!Usable().empty()) return;
  Lock lock(mutex_);
  if (closed_) return;
  cause_ = Fail(run, status);
  ++deferred_;
}

int64_t Store::Deferred(Status* cause) {
  *cause = Usable();
  if (!cause->empty()) return -1;
  Lock lock(mutex_);
  *cause = closed_ ? Status(kClosed) : cause_;
  return closed_ ? -1 : deferred_;
}

Status Store::Forward(int64_t run, size_t bytes) {
  if (Status unusable = Usable(); !unusable.empty()) return unusable;
  Lock lock(mutex_);
  if (closed_) return kClosed;
  if (Run& execution = Begin(run); !execution.error.empty()) return execution.error;
  counters_.planned += bytes;
  counters_.forwarded += bytes;
  return Status();
}

void Store::FailAll(const Status& status) {
  for (auto& [id, run] : runs_) {
    bool any = false;
    for (auto& [device, lane] : run.lanes) any = any || !lane.empty();
    if (any) Fail(id, status);
  }
}

void Store::Drop(const std::shared_ptr<Entry>& entry, const Status& status) {
  entry->dropped = true;
  entry->error = status;
  entries_.erase(entry->key);
  counters_.dropped += entry->bytes;
  for (Chunk& chunk : entry->chunks) {
    switch (chunk.state) {
      case Chunk::State::kHeld:
        if (chunk.copying) break;  // released by the thread that copies
        held_.erase(chunk.order);
        [[fallthrough]];
      case Chunk::State::kEmpty:
      case Chunk::State::kQueued:
      case Chunk::State::kStored:
        Release(chunk);
        break;
      default:  // released by the thread that moves it, or gone
        break;
    }
  }
  AnswerDropped(*entry);
}

void Store::Answer(Entry& entry, const Status& status) {
  Done done = std::move(entry.done);
  entry.done = nullptr;
  Complete([done = std::move(done), status] { done(status); });
}

// Not before the last thread has let go of the memory of the operation.
void Store::AnswerDropped(Entry& entry) {
  if (entry.dropped && entry.done != nullptr && entry.touching == 0) Answer(entry, entry.error);
}

// The execution's record. An execution that ends for reasons of its own tells nobody, so the oldest
// ones are taken for ended.
Store::Run& Store::Begin(int64_t id) {
  auto found = runs_.find(id);
  if (found != runs_.end()) return found->second;
  if (ages_.size() == kRuns) {
    int64_t oldest = ages_.front();
    ages_.pop_front();
    for (auto& [device, lane] : runs_[oldest].lanes) {
      for (auto& [order, entry] : lane) Drop(entry, "this execution was taken for ended long ago");
    }
    runs_.erase(oldest);
  }
  ages_.push_back(id);
  return runs_[id];
}

// A block, if need be one of what the device has too and what was written before `before`.
Block Store::TakeBlock(uint64_t before) {
  Block block = pool_.Take();
  if (block == nullptr && AnyHeld(before)) {
    pool_.Put(TakeHeld());
    block = pool_.Take();
  }
  return block;
}

// As `TakeBlock`, for an execution that needs one. It fails, and this answers false, where the system
// has no memory for any: nothing is there that could become free.
bool Store::TakeFor(int64_t run, Block* block) {
  *block = TakeBlock();
  if (*block != nullptr || pool_.made() > 0) return true;
  Fail(run, "the system has no memory for the pool of spilled values; make the batch or the plan's "
            "budget smaller");
  return false;
}

Block Store::TakeHeld() {
  Chunk& chunk = held_.begin()->second.chunk();
  Block block = std::move(chunk.block);
  chunk.state = Chunk::State::kStored;
  chunk.loaded = false;
  chunk.ahead = false;
  held_.erase(held_.begin());
  return block;
}

bool Store::AnyBlock(uint64_t before) const { return pool_.any() || AnyHeld(before); }

bool Store::AnyHeld(uint64_t before) const {
  return !held_.empty() && held_.begin()->first < before;
}

void Store::Release(Chunk& chunk) {
  if (chunk.block != nullptr) pool_.Put(std::move(chunk.block));
  chunk.state = Chunk::State::kGone;
  chunk.ahead = false;
  extents_.Put(chunk.extent);
  counters_.stored -= Aligned(chunk.bytes);
  Wake();
}

Counters Store::counters() {
  Lock lock(mutex_);
  Counters counters = counters_;
  counters.pool = pool_.made() * kBlockBytes;
  counters.entries = entries_.size();
  return counters;
}

void Store::Settle() {
  Lock lock(mutex_);
  settled_.wait(lock, [this] { return closed_ || Settled(); });
  while (!held_.empty()) pool_.Put(TakeHeld());
}

}  // namespace jdelta
