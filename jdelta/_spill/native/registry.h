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

// Does something with the link of a GPU, made when first needed; or says why there is none. `stream`
// is one of that GPU's.
Status OnLink(int64_t id, int64_t device, Cuda::Stream stream,
              const std::function<Status(Link&)>& action);

}  // namespace jdelta

#endif  // JDELTA_SPILL_REGISTRY_H_
