#include "checksum.h"

#include <cstring>

namespace jdelta {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

uint64_t Rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

uint64_t Round(uint64_t lane, uint64_t input) {
  return Rotate(lane + input * kPrime2, 31) * kPrime1;
}

uint64_t Merge(uint64_t hash, uint64_t lane) {
  return (hash ^ Round(0, lane)) * kPrime1 + kPrime4;
}

template <typename T>
uint64_t Load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

uint64_t Avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

// Takes in the stripes of 32 bytes, four lanes side by side.
uint64_t Stripes(const unsigned char*& at, const unsigned char* end) {
  uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
  for (; end - at >= 32; at += 32) {
    a = Round(a, Load<uint64_t>(at));
    b = Round(b, Load<uint64_t>(at + 8));
    c = Round(c, Load<uint64_t>(at + 16));
    d = Round(d, Load<uint64_t>(at + 24));
  }
  uint64_t hash = Rotate(a, 1) + Rotate(b, 7) + Rotate(c, 12) + Rotate(d, 18);
  return Merge(Merge(Merge(Merge(hash, a), b), c), d);
}

// Takes in the last bytes, fewer than 32.
uint64_t Rest(uint64_t hash, const unsigned char* at, const unsigned char* end) {
  for (; end - at >= 8; at += 8) {
    hash = Rotate(hash ^ Round(0, Load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (end - at >= 4) {
    hash = Rotate(hash ^ (Load<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) hash = Rotate(hash ^ (*at * kPrime5), 11) * kPrime1;
  return hash;
}

}  // namespace

uint64_t Checksum(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  const unsigned char* end = at + bytes;
  uint64_t hash = bytes >= 32 ? Stripes(at, end) : kPrime5;
  return Avalanche(Rest(hash + bytes, at, end));
}

}  // namespace jdelta
