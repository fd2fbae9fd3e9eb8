#include "registry.h"

#include <map>
#include <mutex>

namespace jdelta {
namespace {

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::map<int64_t, std::shared_ptr<Store>> stores;
};

// Never destroyed: threads of XLA may still ask while the process ends.
Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

int64_t RegisterStore(std::shared_ptr<Store> store) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.stores[++registry.last] = std::move(store);
  return registry.last;
}

std::shared_ptr<Store> FindStore(int64_t id) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.stores.find(id);
  return found == registry.stores.end() ? nullptr : found->second;
}

std::shared_ptr<Store> ForgetStore(int64_t id) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.stores.find(id);
  if (found == registry.stores.end()) return nullptr;
  std::shared_ptr<Store> store = std::move(found->second);
  registry.stores.erase(found);
  return store;
}

}  // namespace jdelta
