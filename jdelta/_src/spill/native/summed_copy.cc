#include "summed_copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jdelta {
namespace {

// Two lanes of 64 bits: what compilers have an instruction for on every processor.
using Lanes = uint64_t __attribute__((vector_size(16)));

struct Fletcher {
  Lanes a{}, b{}, c{}, d{};

  void Add(Lanes words) {
    a += words;
    b += a;
    c += b;
    d += c;
  }
};

struct Both {
  Fletcher low, high;

  void Add(Lanes x) {
    low.Add(x & 0xFFFFFFFF);
    high.Add(x >> 32);
  }
};

// Processors fetch ahead within a page only, so one page at a time leaves them waiting for memory:
// lines of four pages are copied in turns, and those of the next four asked for. Each page begins a
// quarter on from the one before: a processor compares addresses within a page only, and lets a load
// wait for a store to the same place of another page (`benchmarks/device/spill.py`).
constexpr size_t kLine = 64, kPage = 4096, kGroup = 4 * kPage;

// An ordinary store would first read what it overwrites, and put out of the cache what a step needs.
void Put(char* to, Lanes x, bool aligned) {
#if defined(__SSE2__)
  if (aligned) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(x));
#endif
  std::memcpy(to, &x, sizeof(x));
}

// Such stores may be seen later than what comes after them, and so than the end of a lock.
void Fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace

Sums SummedCopy(char* to, const char* from, size_t bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % sizeof(Lanes) == 0;
  Both both;
  auto copy = [&](size_t at, size_t end) {
    for (; at < end; at += sizeof(Lanes)) {
      Lanes x;
      std::memcpy(&x, from + at, sizeof(x));
      Put(to + at, x, aligned);
      both.Add(x);
    }
  };
  size_t at = 0;
  for (; bytes - at >= kGroup; at += kGroup) {
    for (size_t line = 0; line < kPage; line += kLine) {
      for (size_t page = 0; page < kGroup; page += kPage) {
        const size_t here = at + page + (page / 4 + line) % kPage;
        __builtin_prefetch(from + here + kGroup);
        copy(here, here + kLine);
      }
    }
  }
  const size_t whole = bytes - bytes % sizeof(Lanes);
  copy(at, whole);
  if (whole < bytes) {
    Lanes x{};
    std::memcpy(&x, from + whole, bytes - whole);
    std::memcpy(to + whole, &x, bytes - whole);
    both.Add(x);
  }
  Fence();
  static_assert(sizeof(Both) == sizeof(Sums));
  Sums sums;
  std::memcpy(sums.data(), &both, sizeof(sums));
  return sums;
}

}  // namespace jdelta
