// What Python calls through ctypes.

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "export.h"
#include "link.h"
#include "registry.h"
#include "summed_copy.h"
#include "waiter.h"

namespace jdelta {
namespace {

int Say(const Status& status, char* message, int64_t size) {
  size_t length = std::min<size_t>(status.size(), size - 1);
  std::memcpy(message, status.data(), length);
  message[length] = '\0';
  return status.empty() ? 0 : -1;
}

}  // namespace
}  // namespace jdelta

using jdelta::Key;

// As in `_OpenOptions` of library.py.
struct OpenOptions {
  const char* place;
  int64_t limit;
  int64_t blocks;
  int64_t checksum;
  double timeout;
  double write_rate;
  double read_rate;
  int64_t file;             // of the disk adapter, which takes it; negative: another adapter
  jdelta::Transfer write;   // of a foreign adapter; none: the memory adapter
  jdelta::Transfer read;
};

JDELTA_EXPORT int64_t jdelta_spill_open(const OpenOptions* options) {
  std::unique_ptr<jdelta::Adapter> adapter =
      options->file >= 0          ? jdelta::NewDiskAdapter(static_cast<int>(options->file))
      : options->write != nullptr ? jdelta::NewForeignAdapter(options->write, options->read)
                                  : jdelta::NewMemoryAdapter();
  adapter = jdelta::Throttled(std::move(adapter), options->write_rate, options->read_rate);
  jdelta::Options values{options->place, options->limit, static_cast<size_t>(options->blocks),
                         options->checksum != 0, options->timeout};
  return jdelta::RegisterStore(std::make_shared<jdelta::Store>(values, std::move(adapter)));
}

// Whether all threads have ended; otherwise the device still holds one of them.
JDELTA_EXPORT int jdelta_spill_close(int64_t id) {
  jdelta::Opened opened = jdelta::ForgetStore(id);
  if (opened.store == nullptr) return true;
  bool ended = opened.store->Close();
  for (auto& [device, link] : opened.links) link->Close();
  return ended;
}

JDELTA_EXPORT void jdelta_spill_settle(int64_t id) {
  if (auto store = jdelta::FindStore(id)) store->Settle();
}

JDELTA_EXPORT void jdelta_spill_counters(int64_t id, jdelta::Counters* counters) {
  if (auto store = jdelta::FindStore(id)) *counters = store->counters();
}

JDELTA_EXPORT void jdelta_spill_defer(int64_t id, int64_t run, const char* cause) {
  if (auto store = jdelta::FindStore(id)) store->Defer(run, cause);
}

// The cause goes into `message`.
JDELTA_EXPORT int64_t jdelta_spill_deferred(int64_t id, char* message, int64_t size) {
  jdelta::Status cause = jdelta::kClosed;
  auto store = jdelta::FindStore(id);
  int64_t deferred = store == nullptr ? -1 : store->Deferred(&cause);
  jdelta::Say(cause, message, size);
  return deferred;
}

// Both wait, and answer zero or put what went wrong into `message`.
JDELTA_EXPORT int jdelta_spill_put(int64_t id, const Key* key, const void* data, int64_t bytes,
                                   char* message, int64_t size) {
  auto store = jdelta::FindStore(id);
  if (store == nullptr) return jdelta::Say("the store is closed", message, size);
  jdelta::Waiter waiter;
  return jdelta::Say(waiter.Wait(store->Write(*key, data, bytes, waiter.done())), message, size);
}

JDELTA_EXPORT int jdelta_spill_get(int64_t id, const Key* key, void* data, int64_t bytes,
                                   char* message, int64_t size) {
  auto store = jdelta::FindStore(id);
  if (store == nullptr) return jdelta::Say("the store is closed", message, size);
  jdelta::Waiter waiter;
  return jdelta::Say(waiter.Wait(store->Read(*key, data, bytes, waiter.done())), message, size);
}

// For tests.
JDELTA_EXPORT int jdelta_spill_send(int64_t id, const Key* place, uint64_t data, int64_t bytes,
                                    void* stream, bool others, char* message, int64_t size) {
  return jdelta::Say(jdelta::WriteOnLink(id, *place, data, bytes, stream, others), message, size);
}

// For tests.
JDELTA_EXPORT int jdelta_spill_fetch(int64_t id, const Key* place, uint64_t data, int64_t bytes,
                                     void* stream, bool others, char* message, int64_t size) {
  return jdelta::Say(jdelta::ReadOnLink(id, *place, data, bytes, stream, others), message, size);
}

// For tests.
JDELTA_EXPORT void jdelta_spill_copy(char* to, const char* from, int64_t bytes,
                                     jdelta::Sums* sums) {
  *sums = jdelta::SummedCopy(to, from, bytes);
}
