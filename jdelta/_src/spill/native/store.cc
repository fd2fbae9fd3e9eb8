#include "store.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace jdelta {
namespace {

std::string Name(const Key& key) {
  return "slot " + std::to_string(key.slot) + ", row " + std::to_string(key.row);
}

}  // namespace

Store::Store(Options options, std::unique_ptr<Adapter> adapter)
    : options_(std::move(options)),
      adapter_(std::move(adapter)),
      process_(getpid()),
      pool_(options_.blocks, [this] { return adapter_->Instead(); }) {}

std::optional<Status> Store::Write(const Key& key, const void* data, size_t bytes, Done done) {
  if (Status status = Usable(); !status.empty()) return status;
  Lock lock(mutex_);
  if (Status status = CheckWrite(key, bytes); !status.empty()) return Fail(key.run, status);
  StartThreads();
  std::shared_ptr<Entry> entry = Enter(key, bytes);
  entry->source = static_cast<const char*>(data);
  return CopyIn(lock, entry, std::move(done));
}

std::optional<Status> Store::Read(const Key& key, void* data, size_t bytes, Done done) {
  if (Status status = Usable(); !status.empty()) return status;
  Lock lock(mutex_);
  if (Status status = CheckRead(key, bytes); !status.empty()) return Fail(key.run, status);
  std::shared_ptr<Entry> entry = entries_.at(key);
  entry->target = static_cast<char*>(data);
  return CopyOut(lock, entry, std::move(done));
}

Status Store::Usable() const {
  // The threads are the other process's, and the lock may be held for ever.
  if (getpid() == process_) return Status();
  return "this process was forked from the one that planned the step; plan it here";
}

Status Store::CheckWrite(const Key& key, size_t bytes) {
  if (closed_) return kClosed;
  Run& run = Begin(key.run);
  if (!run.error.empty()) return run.error;
  if (entries_.count(key)) return Name(key) + " is written twice in one execution";
  int64_t stored = counters_.stored + static_cast<int64_t>(Aligned(bytes));
  if (options_.limit >= 0 && stored > options_.limit) {
    return options_.place + " would hold " + std::to_string(stored) + " bytes, more than limit=" +
           std::to_string(options_.limit) + "; raise the limit, or spill less";
  }
  return Status();
}

Status Store::CheckRead(const Key& key, size_t bytes) {
  if (closed_) return kClosed;
  auto run = runs_.find(key.run);
  if (run != runs_.end() && !run->second.error.empty()) return run->second.error;
  auto found = entries_.find(key);
  if (found == entries_.end()) {
    return Name(key) + " is read but not there: it is read twice, or was not written in this "
           "execution; write and read have to be in one jitted computation";
  }
  const Entry& entry = *found->second;
  if (entry.left > 0 || entry.target != nullptr) return Name(key) + " is read while in use";
  if (entry.bytes != bytes) {
    return Name(key) + " has " + std::to_string(entry.bytes) + " bytes but is read as " +
           std::to_string(bytes);
  }
  return Status();
}

std::shared_ptr<Entry> Store::Enter(const Key& key, size_t bytes) {
  auto entry = std::make_shared<Entry>();
  entry->key = key;
  entry->bytes = bytes;
  entry->order = order_++;
  for (size_t offset = 0; offset < bytes; offset += kBlockBytes) {
    size_t size = std::min(kBlockBytes, bytes - offset);
    entry->chunks.push_back(Chunk{entry.get(), offset, size, order_++, extents_.Take()});
    counters_.stored += Aligned(size);
  }
  entry->left = entry->chunks.size();
  counters_.planned += bytes;
  counters_.most_stored = std::max(counters_.most_stored, counters_.stored);
  entries_[key] = entry;
  runs_[key.run].lanes[key.device][entry->order] = entry;
  return entry;
}

void Store::Leave(const Entry& entry) {
  runs_[entry.key.run].lanes[entry.key.device].erase(entry.order);
  entries_.erase(entry.key);
}

std::optional<Status> Store::CopyIn(Lock& lock, const std::shared_ptr<Entry>& entry, Done done) {
  for (size_t i = 0; i < entry->chunks.size(); ++i) {
    Block block = nullptr;
    if (fills_.empty() && !TakeFor(entry->key.run, &block)) {
      return runs_[entry->key.run].error;
    }
    if (block == nullptr) {  // the store's threads do the rest as memory becomes free
      for (; i < entry->chunks.size(); ++i) fills_.push_back({entry, i});
      entry->done = std::move(done);
      ++counters_.waits;
      Wake();
      return std::nullopt;
    }
    if (Status status = CopyChunkIn(lock, {entry, i}, std::move(block)); !status.empty()) {
      return status;
    }
  }
  return Status();
}

std::optional<Status> Store::CopyOut(Lock& lock, const std::shared_ptr<Entry>& entry, Done done) {
  std::vector<Chunk*> here;
  entry->left = 1;  // for this thread
  for (size_t i = 0; i < entry->chunks.size(); ++i) {
    if (Claim(entry, i)) {
      here.push_back(&entry->chunks[i]);
    } else {
      ++entry->left;
    }
  }
  counters_.late += entry->left > 1;
  Wake();

  ++entry->touching;
  lock.unlock();
  Status status;
  for (Chunk* chunk : here) {
    if (status.empty()) status = CopyChunkOut(*chunk);
  }
  lock.lock();
  --entry->touching;

  for (Chunk* chunk : here) {
    chunk->copying = false;
    if (chunk->state == Chunk::State::kWriting) {
      chunk->taken = true;
    } else {
      Release(*chunk);
    }
  }
  if (!status.empty()) Fail(entry->key.run, status);
  if (entry->dropped && entry->touching == 0) return entry->error;
  if (!entry->dropped) {
    const bool whole = --entry->left == 0;
    if (whole) Leave(*entry);
    PlanAhead(entry->key);
    Wake();
    if (whole) return Status();
  }
  entry->done = std::move(done);
  return std::nullopt;
}

Status Store::CopyChunkIn(Lock& lock, const Job& job, Block block) {
  Entry& entry = *job.entry;
  Chunk& chunk = job.chunk();
  chunk.block = std::move(block);
  chunk.state = Chunk::State::kFilling;
  ++entry.touching;
  lock.unlock();
  chunk.sums = SummedCopy(chunk.block.get(), entry.source + chunk.offset, chunk.bytes);
  lock.lock();
  --entry.touching;
  if (entry.dropped) {
    Release(chunk);
    return entry.error;
  }
  --entry.left;
  chunk.state = Chunk::State::kQueued;
  writes_.push_back(job);
  Wake();
  return Status();
}

// Wants no lock. Fails if the block is not what was written, and then the step must not go on.
Status Store::CopyChunkOut(const Chunk& chunk) const {
  Sums sums = SummedCopy(chunk.entry->target + chunk.offset, chunk.block.get(), chunk.bytes);
  if (!options_.checksum || sums == chunk.sums) return Status();
  return "reading from " + options_.place + ": what came back is not what was written (checksum); "
         "the device or something that writes to it is faulty";
}

// Whether memory has the chunk, which is then the caller's to copy; otherwise it is asked for.
bool Store::Claim(const std::shared_ptr<Entry>& entry, size_t index) {
  Chunk& chunk = entry->chunks[index];
  chunk.ahead = false;
  switch (chunk.state) {
    case Chunk::State::kQueued:  // need not be written any more
      counters_.forwarded += chunk.bytes;
      chunk.state = Chunk::State::kHeld;
      break;
    case Chunk::State::kWriting:
      counters_.held += chunk.bytes;
      break;
    case Chunk::State::kHeld:
      counters_.held += chunk.loaded ? 0 : chunk.bytes;
      held_.erase(chunk.order);
      break;
    case Chunk::State::kStored:
      asked_.push_back({entry, index});
      return false;
    default:  // kLoading
      return false;
  }
  chunk.copying = true;
  return true;
}

// Brings back what a device has still to read, what was written last first, as far as its share of
// the pool reaches: more would put out again what was brought.
void Store::PlanAhead(const Key& key) {
  std::map<int64_t, Lane>& lanes = runs_[key.run].lanes;
  Lane& lane = lanes[key.device];
  size_t reach = pool_.most() / lanes.size();
  for (auto next = lane.end(); next != lane.begin() && reach > 0;) {
    --next;
    size_t many = std::min(reach, next->second->chunks.size());
    for (size_t i = 0; i < many; ++i) BringAhead(next->second, i);
    reach -= many;
  }
}

void Store::BringAhead(const std::shared_ptr<Entry>& entry, size_t index) {
  Chunk& chunk = entry->chunks[index];
  if (chunk.ahead || chunk.state != Chunk::State::kStored || entry->target != nullptr) return;
  chunk.ahead = true;
  ahead_.push_back({entry, index});
}

}  // namespace jdelta
