// Tensors of a GPU on their way to a store and back, through pinned host memory.

#ifndef JDELTA_SPILL_LINK_H_
#define JDELTA_SPILL_LINK_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda.h"
#include "entry.h"
#include "status.h"
#include "store.h"

namespace jdelta {

// Both copies of a tensor are put into the stream of the program, between what computes it and what
// uses it: so the GPU waits for its link to the host, and for nothing else, and no memory of the
// program is in use at another time than XLA takes it to be. The thread of the program runs ahead of
// the GPU. It waits where the host's part is late: in a write for pinned memory, in a read for the
// device that holds the tensor.
//
// Tensors are cut to parts, each of which takes a buffer of pinned memory. A thread follows the
// stream from copy to copy: what has arrived goes to the store, and what has left is free again. A
// part that is read before it went to the store is given back from its buffer.
//
// The number of an iteration is memory of the GPU, so nobody asks for it. What a place of the program
// has written last is read first: a backward pass goes through its loops the other way.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // `buffers` of pinned memory at most. Where `stream` is current, so is the link's GPU.
  Link(std::shared_ptr<Store> store, const Cuda& cuda, Cuda::Context context, size_t buffers);

  // `device` and `slot` are what a `Key` has of them. What goes wrong fails the execution.
  Status Write(const Key& place, Cuda::Address data, size_t bytes, Cuda::Stream stream);
  Status Read(const Key& place, Cuda::Address data, size_t bytes, Cuda::Stream stream);

  // Ends its thread, which waits for the GPU, but not for ever.
  void Close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Buffer {
    char* memory;
    Cuda::Event event;  // the last copy to or from it
  };

  // A part of a tensor that is not in the store yet.
  struct Part {
    Buffer* buffer;
    size_t bytes;
    bool storing;  // on its way from the buffer to the store
  };

  // A copy in the stream, and what comes after it.
  struct Copy {
    Buffer* buffer;
    bool leaving;  // to the host; otherwise the buffer is free after it
    Key part;
    size_t bytes;
  };

  // All of these want the lock to be held, and may let go of it for a time.
  Status Send(Lock& lock, const Key& part, Cuda::Address from, size_t bytes, Cuda::Stream stream);
  Status Fetch(Lock& lock, const Key& part, Cuda::Address to, size_t bytes, Cuda::Stream stream);
  Status Find(Lock& lock, const Key& part, size_t bytes, Buffer** buffer);
  Status Take(Lock& lock, Buffer** buffer);
  Status NewBuffer();
  void Follow(Lock& lock);
  void Arrive(Lock& lock, const Copy& copy, const Status& status);
  void Free(Buffer* buffer);

  const std::shared_ptr<Store> store_;
  const Cuda& cuda_;
  const Cuda::Context context_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  bool following_ = false;  // whether the thread runs
  size_t most_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<Buffer*> free_;
  std::deque<Copy> copies_;  // in the order of the stream
  std::map<Key, Part> parts_;
  std::map<int64_t, std::map<int64_t, int64_t>> rows_;  // by run and slot: written and not read yet
};

}  // namespace jdelta

#endif  // JDELTA_SPILL_LINK_H_
