#include "registry.h"

#include <exception>
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

using Action = std::function<Status(Link&)>;

// Never destroyed: threads of XLA may still ask while the process ends.
Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

// Does something with the driver and the context of a stream; or says why there is none.
Status WithContext(Cuda::Stream stream,
                   const std::function<Status(const Cuda&, Cuda::Context)>& action) {
  Status why;
  const Cuda* cuda = FindCuda(&why);
  if (cuda == nullptr) return why;
  Cuda::Context context = nullptr;
  if (int error = cuda->stream_get_ctx(stream, &context)) return cuda->Explain(error);
  return action(*cuda, context);
}

// Does something with the link of a GPU.
Status OnLink(int64_t id, int64_t device, Cuda::Stream stream, const Action& action) {
  auto find = [&](const Cuda& cuda, Cuda::Context context) -> Status {
    std::shared_ptr<Link> link;
    {
      Registry& registry = TheRegistry();
      std::lock_guard<std::mutex> lock(registry.mutex);
      auto found = registry.opened.find(id);
      if (found == registry.opened.end()) return kClosed;
      std::shared_ptr<Link>& known = found->second.links[device];
      if (known == nullptr) {
        known = std::make_shared<Link>(found->second.store, cuda, context, kBuffers);
      }
      link = known;
    }
    return action(*link);
  };
  try {
    return WithContext(stream, find);
  } catch (const std::exception& error) {  // of the system: no memory, no thread
    return error.what();
  }
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

Status Others::Answer(int64_t id, int64_t run, const Status& status) const {
  if (status.empty() || !any) return status;
  if (std::shared_ptr<Store> store = FindStore(id)) store->Defer(run, status);
  return spoil();
}

Status WriteOnLink(int64_t id, const Key& place, Cuda::Address data, size_t bytes,
                   Cuda::Stream stream, bool others) {
  Status status = OnLink(id, place.device, stream, [&](Link& link) {
    return link.Write(place, data, bytes, stream);
  });
  return Others{others}.Answer(id, place.run, status);
}

Status ReadOnLink(int64_t id, const Key& place, Cuda::Address data, size_t bytes,
                  Cuda::Stream stream, bool others) {
  Status status = OnLink(id, place.device, stream, [&](Link& link) {
    return link.Read(place, data, bytes, stream);
  });
  auto spoil = [&] {
    if (bytes == 0) return Status();
    return WithContext(stream, [&](const Cuda& cuda, Cuda::Context context) {
      Current current(cuda, context);
      return cuda.Explain(cuda.memset_async(data, kSpoiled, bytes, stream));
    });
  };
  return Others{others, spoil}.Answer(id, place.run, status);
}

}  // namespace jdelta
