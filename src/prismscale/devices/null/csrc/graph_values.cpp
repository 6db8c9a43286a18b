// What a graph writes: its replays compute nothing, so its values are what a capture says of them (that
// all are finite; what follows from constants), and unknown otherwise.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_set>

#include "fallback.h"
#include "graph_capture.h"

namespace prismscale {

namespace {

// Values in memory that no storage holds any more. Programs give up the tensors that a graph writes and
// keep bare pointers to them (Transformer Engine's make_weak_ref), for the pool to use their memory
// again: between the replay that writes there and the next one that does, the values are there.
class LeftValues {
 public:
  void set(uint64_t address, size_t bytes, LeftValue value) {
    erase(address, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.emplace(address, Entry{bytes, std::move(value)});
  }
  void erase(uint64_t address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = entries_.lower_bound(address);
    while (found != entries_.begin() && end_of(*std::prev(found)) > address) --found;
    while (found != entries_.end() && found->first < address + bytes) found = entries_.erase(found);
  }
  LeftValue find(uint64_t address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = entries_.upper_bound(address);
    if (found == entries_.begin() || end_of(*--found) < address + bytes) return {};
    LeftValue value = found->second.value;
    value.offset = address - found->first;
    return value;
  }

 private:
  struct Entry {
    size_t bytes;
    LeftValue value;
  };
  using Entries = std::map<uint64_t, Entry>;
  static uint64_t end_of(const Entries::value_type& entry) {
    return entry.first + entry.second.bytes;
  }
  std::mutex mutex_;
  Entries entries_;
};

LeftValues& left_values() {
  static auto* values = new LeftValues();
  return *values;
}

c10::Storage storage_of(const std::vector<char>& bytes) {
  if (bytes.empty()) return {};
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes.size(), c10::GetCPUAllocator(), false);
  std::ranges::copy(bytes, static_cast<char*>(storage.mutable_data()));
  return storage;
}

uint64_t address_of(const c10::Storage& storage) {
  return reinterpret_cast<uint64_t>(storage.data());
}

}  // namespace

// Held weakly: a graph keeps no tensor alive, only its pool keeps their memory.
struct WrittenStorages {
  struct Written {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    uint64_t address;
    size_t bytes;
    std::vector<char> shadow;  // empty: unknown
    std::optional<double> uniform;
    bool is_check = false;
  };
  std::mutex mutex;
  std::unordered_set<const c10::StorageImpl*> seen;
  std::vector<Written> storages;
  std::map<uint64_t, size_t> scratch;  // bytes by address: what the capture has freed again

  void add(const at::Tensor& tensor) {
    if (!is_null(tensor)) return;
    const c10::Storage& storage = tensor.storage();
    std::lock_guard<std::mutex> lock(mutex);
    if (seen.insert(storage.unsafeGetStorageImpl()).second) {
      storages.push_back({storage.getWeakStorageImpl(), address_of(storage), storage.nbytes(), {},
                          std::nullopt});
    }
  }

  // The capture is over: its temporaries are no tensors any more.
  void set_scratch_apart() {
    std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(storages, [this](const Written& written) {
      if (!written.storage.expired()) return false;
      size_t& bytes = scratch[written.address];
      bytes = std::max(bytes, written.bytes);
      return true;
    });
  }

  // `visit` of the allocation, nullptr where the program has given it up.
  template <typename F>
  void each(F&& visit) {
    std::lock_guard<std::mutex> lock(mutex);
    for (Written& written : storages) {
      auto storage = written.storage.lock();
      visit(written, storage ? allocation_of(c10::Storage(std::move(storage))) : nullptr);
    }
  }
};

std::shared_ptr<WrittenStorages> no_written_storages() { return std::make_shared<WrittenStorages>(); }

void close_written_storages(WrittenStorages& storages) {
  storages.set_scratch_apart();
  storages.each([](WrittenStorages::Written& written, const Allocation* allocation) {
    if (allocation == nullptr) return;
    if (allocation->shadow) {
      const auto* bytes = static_cast<const char*>(allocation->shadow.data());
      written.shadow.assign(bytes, bytes + allocation->shadow.nbytes());
    }
    written.uniform = allocation->uniform;
    written.is_check = allocation->is_check;
  });
}

void write_storages(WrittenStorages& storages) {
  for (const auto& [address, bytes] : storages.scratch) left_values().erase(address, bytes);
  storages.each([](const WrittenStorages::Written& written, Allocation* allocation) {
    if (allocation == nullptr) {
      LeftValue left{storage_of(written.shadow), 0, written.uniform};
      left_values().set(written.address, written.bytes, std::move(left));
      return;
    }
    allocation->uniform = written.uniform;
    allocation->is_check = written.is_check;
    allocation->shadow = storage_of(written.shadow);
  });
}

LeftValue left_value(const at::Tensor& tensor) {
  return left_values().find(address_of(tensor.storage()), tensor.storage().nbytes());
}

void forget_left(const at::Tensor& tensor) {
  left_values().erase(address_of(tensor.storage()), tensor.storage().nbytes());
}

bool lasts_in_graph(const at::Tensor& tensor) {
  const RecordedGraph* graph = open_graph();
  if (graph == nullptr || !tensor.defined()) return false;
  // A number in a tensor's clothes is copied into the kernel's arguments; other host memory may change.
  if (!is_null(tensor)) return tensor.dim() == 0 && !tensor.is_pinned();
  const Allocation* allocation = allocation_of(tensor);
  return allocation != nullptr && allocation->shadow && allocation->lasts_in == graph->id;
}

bool lasts_in_graph(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  bool lasts = true;
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    const bool is_read = !info.overwritten[static_cast<size_t>(argument)];
    if (is_read && tensor.defined() && tensor.numel() > 0) lasts &= lasts_in_graph(tensor);
  });
  return lasts;
}

void set_lasting(const at::Tensor& tensor) {
  const RecordedGraph* graph = open_graph();
  if (graph == nullptr || !is_null(tensor)) return;
  if (Allocation* allocation = allocation_of(tensor)) allocation->lasts_in = graph->id;
}

void set_lasting(
    const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> outputs) {
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (info.written[static_cast<size_t>(argument)]) set_lasting(tensor);
  });
  each_tensor(outputs, [](const at::Tensor& tensor, int, int) { set_lasting(tensor); });
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
