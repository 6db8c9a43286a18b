// What a graph writes: nothing of it is ever computed, so its values are what a capture says of them
// without computing (that all are finite), and unknown otherwise.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "fallback.h"
#include "graph_capture.h"

namespace prismscale {

// Held weakly: a graph keeps no tensor alive, only its pool keeps their memory.
struct WrittenStorages {
  struct Written {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<char> shadow;  // empty: unknown
    std::optional<double> uniform;
    bool is_check = false;
  };
  std::mutex mutex;
  std::unordered_set<const c10::StorageImpl*> seen;
  std::vector<Written> storages;

  void add(const at::Tensor& tensor) {
    if (!is_null(tensor)) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    std::lock_guard<std::mutex> lock(mutex);
    if (seen.insert(storage).second) {
      storages.push_back({tensor.storage().getWeakStorageImpl(), {}, std::nullopt});
    }
  }

  template <typename F>
  void each(F&& visit) {
    std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(storages, [](const Written& written) { return written.storage.expired(); });
    for (Written& written : storages) {
      auto storage = written.storage.lock();
      Allocation* allocation = storage ? allocation_of(c10::Storage(std::move(storage))) : nullptr;
      if (allocation != nullptr) visit(written, *allocation);
    }
  }
};

std::shared_ptr<WrittenStorages> no_written_storages() { return std::make_shared<WrittenStorages>(); }

void close_written_storages(WrittenStorages& storages) {
  storages.each([](WrittenStorages::Written& written, Allocation& allocation) {
    if (allocation.shadow) {
      const auto* bytes = static_cast<const char*>(allocation.shadow.data());
      written.shadow.assign(bytes, bytes + allocation.shadow.nbytes());
    }
    written.uniform = allocation.uniform;
    written.is_check = allocation.is_check;
  });
}

void write_storages(WrittenStorages& storages) {
  storages.each([](WrittenStorages::Written& written, Allocation& allocation) {
    allocation.uniform = written.uniform;
    allocation.is_check = written.is_check;
    allocation.shadow = c10::Storage();
    if (written.shadow.empty()) return;
    allocation.shadow = c10::Storage(c10::Storage::use_byte_size_t(), written.shadow.size(),
                                     c10::GetCPUAllocator(), false);
    std::ranges::copy(written.shadow, static_cast<char*>(allocation.shadow.mutable_data()));
  });
}

void written_in_graph(
    const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> outputs) {
  RecordedGraph* graph = open_graph();
  if (graph == nullptr) return;
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (info.forgets_all || info.written[static_cast<size_t>(argument)]) graph->written->add(tensor);
  });
  each_tensor(outputs, [&](const at::Tensor& tensor, int, int) { graph->written->add(tensor); });
}

void written_in_graph(const at::Tensor& tensor) {
  if (RecordedGraph* graph = open_graph()) graph->written->add(tensor);
}

}  // namespace prismscale
