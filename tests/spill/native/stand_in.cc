// A stand-in for NVIDIA's driver, with GPUs that are threads of this process.
//
// A stream does one thing after the other, some time after it was asked to. An address of a GPU's
// memory is not one of the process: who reads it from the host dies. What real drivers refuse is
// refused: no context is current, a stream of another GPU.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#define SHOWN extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kLaunchFailed = 719;
constexpr uint64_t kApart = uint64_t{1} << 46;  // from memory of the process to that of a GPU

thread_local void* current = nullptr;
std::atomic<int64_t> pinned{0};   // buffers of pinned memory
std::atomic<int64_t> copies{-1};  // that go well before one fails; negative: all

char* Real(uint64_t address) { return reinterpret_cast<char*>(address ^ kApart); }

struct Stream {
  explicit Stream(void* context) : context(context), random(7), thread([this] { Run(); }) {}

  void Ask(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    work_.push_back(std::move(work));
    ++asked;
    changed.notify_all();
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return ended || !work_.empty(); });
      if (work_.empty()) return;
      std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      work();
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }

  void WaitFor(int64_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= count; });
  }

  void* context;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work_;
  int64_t asked = 0, done = 0;
  bool ended = false;
  std::minstd_rand random;
  std::thread thread;
};

struct Event {
  std::mutex mutex;
  Stream* stream = nullptr;
  int64_t count = 0;
};

void Fill(char* data, int64_t bytes, uint64_t seed) {
  for (int64_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<char>((seed + i / 4096) * 2654435761 >> 8 ^ i);
  }
}

bool Fails() { return copies >= 0 && copies-- == 0; }

int Copy(Stream* stream, std::function<void()> work) {
  if (current == nullptr || stream->context != current) return kInvalidContext;
  if (Fails()) return kLaunchFailed;
  stream->Ask(std::move(work));
  return 0;
}

}  // namespace

// Of the driver's interface

SHOWN int cuGetErrorString(int error, const char** text) {
  *text = error == kInvalidContext ? "invalid context" : error == kLaunchFailed ? "launch failed" : "?";
  return 0;
}

SHOWN int cuCtxPushCurrent_v2(void* context) {
  if (current != nullptr) return kInvalidContext;  // nobody here needs two
  current = context;
  return 0;
}

SHOWN int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = nullptr;
  return 0;
}

SHOWN int cuStreamGetCtx(Stream* stream, void** context) {
  *context = stream->context;
  return 0;
}

SHOWN int cuEventCreate(Event** event, unsigned flags) {
  if (flags != 3 || current == nullptr) return kInvalidValue;
  *event = new Event;
  return 0;
}

SHOWN int cuEventDestroy_v2(Event* event) {
  delete event;
  return 0;
}

SHOWN int cuEventRecord(Event* event, Stream* stream) {
  std::lock_guard<std::mutex> lock(event->mutex);
  std::lock_guard<std::mutex> asking(stream->mutex);
  event->stream = stream;
  event->count = stream->asked;
  return 0;
}

SHOWN int cuEventSynchronize(Event* event) {
  Stream* stream;
  int64_t count;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    stream = event->stream;
    count = event->count;
  }
  stream->WaitFor(count);
  return 0;
}

SHOWN int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (flags != 1 || current == nullptr) return kInvalidValue;
  *memory = aligned_alloc(4096, bytes);
  ++pinned;
  return *memory == nullptr ? kOutOfMemory : 0;
}

SHOWN int cuMemFreeHost(void* memory) {
  free(memory);
  --pinned;
  return 0;
}

SHOWN int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  return Copy(stream, [=] { std::memcpy(to, Real(from), bytes); });
}

SHOWN int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  return Copy(stream, [=] { std::memcpy(Real(to), from, bytes); });
}

SHOWN int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, Stream* stream) {
  return Copy(stream, [=] { std::memset(Real(to), byte, bytes); });
}

// What a test asks of a GPU

SHOWN Stream* gpu_stream(int64_t gpu) { return new Stream(reinterpret_cast<void*>(gpu + 1)); }

SHOWN void gpu_end(Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->ended = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
}

SHOWN uint64_t gpu_memory(int64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return reinterpret_cast<uint64_t>(data) ^ kApart;
}

// Computes something from a seed, into memory.
SHOWN void gpu_compute(Stream* stream, uint64_t to, int64_t bytes, int64_t seed) {
  stream->Ask([=] { Fill(Real(to), bytes, seed); });
}

// Counts a difference if memory does not hold what was computed from the seed.
SHOWN void gpu_compare(Stream* stream, uint64_t data, int64_t bytes, int64_t seed,
                       std::atomic<int64_t>* wrong) {
  stream->Ask([=] {
    std::string expected(bytes, '\0');
    Fill(expected.data(), bytes, seed);
    if (std::memcmp(expected.data(), Real(data), bytes) != 0) ++*wrong;
  });
}

// Counts the bytes of memory that are others than `byte`.
SHOWN void gpu_count(Stream* stream, uint64_t data, int64_t bytes, int64_t byte,
                     std::atomic<int64_t>* wrong) {
  stream->Ask([=] {
    for (int64_t i = 0; i < bytes; ++i) *wrong += Real(data)[i] != static_cast<char>(byte);
  });
}

SHOWN void gpu_wait(Stream* stream) {
  int64_t asked;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    asked = stream->asked;
  }
  stream->WaitFor(asked);
}

SHOWN int64_t gpu_pinned() { return pinned; }

SHOWN void gpu_fail_after(int64_t good) { copies = good; }
