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
  size_t at = 0;
  for (; bytes - at >= sizeof(Lanes); at += sizeof(Lanes)) {
    Lanes x;
    std::memcpy(&x, from + at, sizeof(x));
    Put(to + at, x, aligned);
    both.Add(x);
  }
  if (at < bytes) {
    Lanes x{};
    std::memcpy(&x, from + at, bytes - at);
    std::memcpy(to + at, &x, bytes - at);
    both.Add(x);
  }
  Fence();
  static_assert(sizeof(Both) == sizeof(Sums));
  Sums sums;
  std::memcpy(sums.data(), &both, sizeof(sums));
  return sums;
}

}  // namespace jdelta
