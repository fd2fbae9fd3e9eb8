// Where spilled tensors are between the write of the forward pass and the read of the backward pass.

#ifndef JDELTA_SPILL_STORE_H_
#define JDELTA_SPILL_STORE_H_

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "adapter.h"
#include "entry.h"
#include "extents.h"
#include "pool.h"
#include "status.h"

namespace jdelta {

struct Options {
  std::string place;  // for messages
  int64_t limit;      // most bytes on the device; negative: any
  size_t blocks;      // most blocks in memory
  bool checksum;
  double timeout;     // seconds without an answer of the device
};

// Bytes, if nothing else is said. When nothing goes on and no step failed,
// `planned = written + forwarded`. Python reads this as an array of int64 in this order.
struct Counters {
  int64_t planned = 0;     // given to the store
  int64_t written = 0;     // written to the device
  int64_t forwarded = 0;   // given back from memory, and never written
  int64_t held = 0;        // given back from memory although it was written
  int64_t read = 0;        // read from the device
  int64_t ahead = 0;       // of `read`, before it was asked for
  int64_t dropped = 0;     // of failed or abandoned steps
  int64_t waits = 0;       // number of writes that had to wait for memory of the pool
  int64_t late = 0;        // number of reads that had to wait for the device
  int64_t failures = 0;    // number of failed steps
  int64_t stored = 0;      // on the device now
  int64_t most_stored = 0;
  int64_t writing = 0;     // nanoseconds in which the device was writing
  int64_t reading = 0;     // nanoseconds in which the device was reading
  int64_t pool = 0;        // memory of the pool now
  int64_t entries = 0;     // number of tensors in the store now
};

// Tensors are cut to blocks. A write copies them into the pool and threads of the store move them
// from there to the device; a read takes from the pool what is still or again there (and cancels
// the write of what has not left yet), and the threads bring back the rest. When one is read, what
// was written last is brought back ahead, because a backward pass reads in reverse order.
//
// Nothing waits in a circle: a queued block needs nothing but the device to become free; what is in
// memory and on the device may be put out of memory at any time; a tensor that waits to be read may
// take the place of any such block, one that is brought ahead only of one that is read later.
//
// What goes wrong fails the execution in which it happens: all of its tensors are dropped, and its
// operations answer with what went wrong. The next execution knows nothing of it.
class Store : public std::enable_shared_from_this<Store> {
 public:
  Store(Options options, std::unique_ptr<Adapter> adapter);

  // All answer at once, or answer nothing and call `done` later; until then the memory is in use.
  std::optional<Status> Write(const Key& key, const void* data, size_t bytes, Done done);
  std::optional<Status> Read(const Key& key, void* data, size_t bytes, Done done);

  // Counts what an execution has got back without having written it. Its error if it has failed.
  Status Forward(int64_t run, size_t bytes);

  // Fails an execution. Answers with what it failed for, which may be something earlier.
  Status FailRun(int64_t run, const Status& status);

  // Fails an execution whose program goes on all the same, as other devices may wait for it.
  void Defer(int64_t run, const Status& status);

  // How often that was, and the last cause; negative, and why, where nobody can know.
  int64_t Deferred(Status* cause);

  // Returns when all that was to be written is written; then forgets what memory still has of it.
  void Settle();

  // Fails what goes on and ends the threads. Waits for the device, but not for ever: whether all ended.
  bool Close();

  Counters counters();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  // The tensors of one execution on one device in the order in which they were written.
  using Lane = std::map<uint64_t, std::shared_ptr<Entry>>;

  struct Run {
    Status error;
    std::map<int64_t, Lane> lanes;
  };

  // store.cc: all of these want the lock to be held; those that take it let go of it for a time.
  Status Usable() const;
  Status CheckWrite(const Key& key, size_t bytes);
  Status CheckRead(const Key& key, size_t bytes);
  std::shared_ptr<Entry> Enter(const Key& key, size_t bytes);
  void Leave(const Entry& entry);
  std::optional<Status> CopyIn(Lock& lock, const std::shared_ptr<Entry>& entry, Done done);
  Status CopyChunkIn(Lock& lock, const Job& job, Block block);
  std::optional<Status> CopyOut(Lock& lock, const std::shared_ptr<Entry>& entry, Done done);
  Status CopyChunkOut(const Chunk& chunk) const;
  bool Claim(const std::shared_ptr<Entry>& entry, size_t index);
  void PlanAhead(const Key& key);
  void BringAhead(const std::shared_ptr<Entry>& entry, size_t index);

  // life.cc
  Status Fail(int64_t run, const Status& status);
  void FailAll(const Status& status);
  void Drop(const std::shared_ptr<Entry>& entry, const Status& status);
  void Answer(Entry& entry, const Status& status);
  void AnswerDropped(Entry& entry);
  Run& Begin(int64_t run);
  Block TakeBlock(uint64_t before = UINT64_MAX);
  bool TakeFor(int64_t run, Block* block);
  Block TakeHeld();
  bool AnyBlock(uint64_t before = UINT64_MAX) const;
  bool AnyHeld(uint64_t before) const;
  void Release(Chunk& chunk);

  // threads.cc
  void StartThreads();
  void WriteLoop(Lock& lock);
  void ReadLoop(Lock& lock);
  void WatchLoop(Lock& lock);
  void Fill(Lock& lock, Block block);
  void Send(Lock& lock);
  void FetchAsked(Lock& lock);
  bool AheadCanGo();
  void FetchAhead(Lock& lock);
  void Fetch(Lock& lock, const Job& job, Block block);
  void Deliver(Lock& lock, const Job& job);
  bool Busy() const;
  bool Settled() const;
  void Wake();
  Status Transfer(Lock& lock, const Job& job, bool write);
  Status WriteChunk(const Chunk& chunk);

  const Options options_;
  const std::unique_ptr<Adapter> adapter_;
  const pid_t process_;

  std::mutex mutex_;
  std::condition_variable to_write_;  // for the threads that write
  std::condition_variable to_read_;   // for those that read
  std::condition_variable settled_;   // for `Settle`
  std::condition_variable ended_;     // for `Close` and the thread that watches
  bool closed_ = false;
  int threads_ = 0;

  Pool pool_;
  Extents extents_;
  Counters counters_;
  int64_t deferred_ = 0;
  Status cause_;              // of the last that was
  uint64_t order_ = 0;
  std::map<Key, std::shared_ptr<Entry>> entries_;
  std::map<int64_t, Run> runs_;
  std::deque<int64_t> ages_;  // the runs, oldest first

  std::deque<Job> fills_;             // wait for a block to be copied into
  std::deque<Job> writes_;            // wait for the device
  std::deque<Job> asked_;             // wait to be read, and somebody waits for them
  std::deque<Job> ahead_;             // wait to be read ahead
  std::map<uint64_t, Job> held_;      // may be put out of memory, first written first
  int wanting_ = 0;                   // threads that want a block for what somebody waits for

  // What the device has been asked and has not answered.
  struct Traffic {
    int transfers = 0;
    Clock::time_point since;  // the first of them was asked
  };
  Traffic writing_;
  Traffic reading_;
  Clock::time_point answered_;        // when it last did, or was asked after all was answered
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_STORE_H_
