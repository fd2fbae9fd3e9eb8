// The stores of this process by the number under which compiled programs know them.

#ifndef JDELTA_SPILL_REGISTRY_H_
#define JDELTA_SPILL_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "cuda.h"
#include "link.h"
#include "status.h"
#include "store.h"

namespace jdelta {

// A store, and what GPUs reach it by, by their numbers.
struct Opened {
  std::shared_ptr<Store> store;
  std::map<int64_t, std::shared_ptr<Link>> links;
};

int64_t RegisterStore(std::shared_ptr<Store> store);
std::shared_ptr<Store> FindStore(int64_t id);
Opened ForgetStore(int64_t id);

constexpr unsigned char kSpoiled = 0xff;  // not a number, where it is a floating-point number

// What an operation does that fails while other devices run the program too: these may wait for this
// one in a collective, and for ever if its program ended here. So it goes on, Python is told by the
// store once all have ended, and what was to be read is spoiled.
struct Others {
  bool any;
  std::function<Status()> spoil = [] { return Status(); };

  // What to answer to a `status`.
  Status Answer(int64_t id, int64_t run, const Status& status) const;
};

// As the link of a GPU does, which is made when first needed; or why there is none. `stream` is one of
// that GPU's. `others` is whether there are other devices.
Status WriteOnLink(int64_t id, const Key& place, Cuda::Address data, size_t bytes,
                   Cuda::Stream stream, bool others);
Status ReadOnLink(int64_t id, const Key& place, Cuda::Address data, size_t bytes,
                  Cuda::Stream stream, bool others);

}  // namespace jdelta

#endif  // JDELTA_SPILL_REGISTRY_H_
