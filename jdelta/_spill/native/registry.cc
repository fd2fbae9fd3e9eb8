#include "registry.h"

#include <mutex>
#include <utility>

namespace jdelta {
namespace {

// Of pinned memory for each GPU, 16 MiB each: some on their way to the store, some on their way back.
constexpr size_t kBuffers = 8;

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::map<int64_t, Opened> opened;
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
  registry.opened[++registry.last].store = std::move(store);
  return registry.last;
}

std::shared_ptr<Store> FindStore(int64_t id) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.opened.find(id);
  return found == registry.opened.end() ? nullptr : found->second.store;
}

Opened ForgetStore(int64_t id) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.opened.find(id);
  if (found == registry.opened.end()) return Opened();
  Opened opened = std::move(found->second);
  registry.opened.erase(found);
  return opened;
}

Status OnLink(int64_t id, int64_t device, Cuda::Stream stream,
              const std::function<Status(Link&)>& action) {
  Status why;
  const Cuda* cuda = FindCuda(&why);
  if (cuda == nullptr) return why;
  Cuda::Context context = nullptr;
  if (int error = cuda->stream_get_ctx(stream, &context)) return cuda->Explain(error);
  std::shared_ptr<Link> link;
  {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    auto found = registry.opened.find(id);
    if (found == registry.opened.end()) return kClosed;
    std::shared_ptr<Link>& known = found->second.links[device];
    if (known == nullptr) {
      known = std::make_shared<Link>(found->second.store, *cuda, context, kBuffers);
    }
    link = known;
  }
  return action(*link);
}

}  // namespace jdelta
