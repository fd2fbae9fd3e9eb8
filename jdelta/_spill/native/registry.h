// The stores of this process by the number under which compiled programs know them.

#ifndef JDELTA_SPILL_REGISTRY_H_
#define JDELTA_SPILL_REGISTRY_H_

#include <cstdint>
#include <memory>

#include "store.h"

namespace jdelta {

int64_t RegisterStore(std::shared_ptr<Store> store);
std::shared_ptr<Store> FindStore(int64_t id);
std::shared_ptr<Store> ForgetStore(int64_t id);

}  // namespace jdelta

#endif  // JDELTA_SPILL_REGISTRY_H_
