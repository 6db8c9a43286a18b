// Values of what a graph writes. Replays compute nothing. So these values are what the capture
// knew: that all are finite, and what is computed from constants and from inputs that have not
// changed since then. All others are unknown.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <map>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "fallback.h"
#include "graph_capture.h"

namespace prismscale {

namespace {

// Values in memory that no storage holds any more. Programs free the tensors that a graph writes
// and keep bare pointers to them (Transformer Engine's make_weak_ref), so that the pool can reuse
// their memory. A value is there from the replay that writes it until the next replay that writes
// there.
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

std::vector<char> bytes_of(const c10::Storage& shadow) {
  if (!shadow) return {};
  const auto* bytes = static_cast<const char*>(shadow.data());
  return {bytes, bytes + shadow.nbytes()};
}

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Calls `use` with the storage's allocation, which stays alive meanwhile; nullptr if it is gone.
template <typename F>
auto with_allocation(const WeakStorage& storage, F&& use) {
  auto held = storage.lock();
  return use(held ? allocation_of(c10::Storage(std::move(held))) : nullptr);
}

uint64_t address_of(const c10::Storage& storage) {
  return reinterpret_cast<uint64_t>(storage.data());
}

}  // namespace

// Storages are held weakly: a graph keeps no tensor alive, only its pool keeps their memory.
struct WrittenStorages {
  struct Written {
    WeakStorage storage;
    uint64_t address;
    size_t bytes;
    std::vector<char> shadow;  // empty: unknown
    GraphInputs made_of;       // the shadow is known while these inputs are unchanged
    std::optional<double> uniform;
    bool is_check = false;
  };
  struct Input {
    WeakStorage storage;
    std::vector<char> shadow;  // its value in the capture

    bool is_still(const Allocation* found) const {
      return found != nullptr && found->shadow && found->shadow.nbytes() == shadow.size() &&
          std::memcmp(found->shadow.data(), shadow.data(), shadow.size()) == 0;
    }
  };
  std::mutex mutex;
  std::unordered_set<const c10::StorageImpl*> seen;
  std::vector<Input> inputs;
  std::unordered_map<const c10::StorageImpl*, uint32_t> input_of;
  std::vector<Written> storages;
  std::map<uint64_t, size_t> scratch;  // bytes by address of what the capture itself has freed

  void add(const at::Tensor& tensor) {
    if (!is_null(tensor)) return;
    const c10::Storage& storage = tensor.storage();
    std::lock_guard<std::mutex> lock(mutex);
    if (seen.insert(storage.unsafeGetStorageImpl()).second) {
      storages.push_back({storage.getWeakStorageImpl(), address_of(storage), storage.nbytes(), {},
                          {}, std::nullopt});
    }
  }

  // Gives a known tensor its number as an input; false if the graph has written it.
  bool number(const at::Tensor& tensor, const Allocation& allocation, uint32_t& number) {
    const c10::Storage& storage = tensor.storage();
    std::lock_guard<std::mutex> lock(mutex);
    if (seen.contains(storage.unsafeGetStorageImpl())) return false;
    const auto [found, is_new] = input_of.try_emplace(
        storage.unsafeGetStorageImpl(), static_cast<uint32_t>(inputs.size()));
    if (is_new) inputs.push_back({storage.getWeakStorageImpl(), bytes_of(allocation.shadow)});
    number = found->second;
    return true;
  }

  // At the end of the capture: moves its temporaries, which are freed by now, to `scratch`.
  void set_scratch_apart() {
    std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(storages, [this](const Written& written) {
      if (!written.storage.expired()) return false;
      size_t& bytes = scratch[written.address];
      bytes = std::max(bytes, written.bytes);
      return true;
    });
  }

  template <typename F>
  void each(F&& visit) {
    std::lock_guard<std::mutex> lock(mutex);
    for (Written& written : storages) {
      with_allocation(written.storage, [&](Allocation* found) { visit(written, found); });
    }
  }
};

std::shared_ptr<WrittenStorages> no_written_storages() {
  return std::make_shared<WrittenStorages>();
}

void close_written_storages(WrittenStorages& storages, uint64_t graph) {
  storages.set_scratch_apart();
  storages.each([graph](WrittenStorages::Written& written, const Allocation* allocation) {
    if (allocation == nullptr) return;
    written.shadow = bytes_of(allocation->shadow);
    if (allocation->lasts_in == graph) written.made_of = allocation->made_of;
    written.uniform = allocation->uniform;
    written.is_check = allocation->is_check;
  });
  // A capture runs nothing, so its inputs get back the values that they had.
  for (const auto& input : storages.inputs) {
    with_allocation(input.storage, [&](Allocation* found) {
      if (found != nullptr && !input.is_still(found)) found->shadow = storage_of(input.shadow);
    });
  }
}

void write_storages(WrittenStorages& storages) {
  for (const auto& [address, bytes] : storages.scratch) left_values().erase(address, bytes);
  std::vector<bool> holds;
  for (const auto& input : storages.inputs) {
    holds.push_back(with_allocation(
        input.storage, [&](const Allocation* found) { return input.is_still(found); }));
  }
  std::unordered_map<const void*, bool> known;  // by the list of inputs
  const auto is_known = [&](const GraphInputs& inputs) {
    if (!inputs) return true;
    const auto [found, is_new] = known.try_emplace(inputs.get());
    if (is_new) found->second = std::ranges::all_of(*inputs, [&](uint32_t i) { return holds[i]; });
    return found->second;
  };
  storages.each([&](WrittenStorages::Written& written, Allocation* allocation) {
    const std::vector<char> nothing;
    const std::vector<char>& shadow = is_known(written.made_of) ? written.shadow : nothing;
    if (allocation == nullptr) {
      LeftValue left{storage_of(shadow), 0, written.uniform};
      left_values().set(written.address, written.bytes, std::move(left));
      return;
    }
    allocation->uniform = written.uniform;
    allocation->is_check = written.is_check;
    allocation->shadow = storage_of(shadow);
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
  // A 0-dim host tensor is copied into the kernel's arguments; other host memory may change.
  if (!is_null(tensor)) return tensor.dim() == 0 && !tensor.is_pinned();
  const Allocation* allocation = allocation_of(tensor);
  return allocation != nullptr && allocation->shadow && allocation->lasts_in == graph->id &&
      !allocation->made_of;
}

bool repeats_in_graph(
    const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, GraphInputs& inputs) {
  RecordedGraph* graph = open_graph();
  bool repeats = graph != nullptr;
  std::vector<uint32_t> numbers;
  std::unordered_set<const void*> counted;
  const auto count = [&](const at::Tensor& tensor) {
    if (!is_null(tensor)) return lasts_in_graph(tensor);
    const Allocation* allocation = allocation_of(tensor);
    if (allocation == nullptr || !allocation->shadow) return false;
    if (allocation->lasts_in == graph->id) {
      const GraphInputs& of = allocation->made_of;
      if (of && counted.insert(of.get()).second)
        numbers.insert(numbers.end(), of->begin(), of->end());
      return true;
    }
    numbers.emplace_back();
    return graph->written->number(tensor, *allocation, numbers.back());
  };
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (!repeats || !tensor.defined() || tensor.numel() == 0) return;
    // A tensor that is written only in part keeps its old value in the rest, so it counts as read.
    const bool is_read = !info.overwritten[static_cast<size_t>(argument)] ||
        (is_null(tensor) && !covers_storage(tensor));
    if (is_read) repeats = count(tensor);
  });
  if (!repeats || numbers.empty()) return repeats;
  std::ranges::sort(numbers);
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  inputs = std::make_shared<const std::vector<uint32_t>>(std::move(numbers));
  return true;
}

void set_lasting(const at::Tensor& tensor, const GraphInputs& inputs) {
  const RecordedGraph* graph = open_graph();
  if (graph == nullptr || !is_null(tensor)) return;
  if (Allocation* allocation = allocation_of(tensor)) {
    allocation->lasts_in = graph->id;
    allocation->made_of = inputs;
  }
}

void set_lasting(
    const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> outputs,
    const GraphInputs& inputs) {
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (info.written[static_cast<size_t>(argument)]) set_lasting(tensor, inputs);
  });
  each_tensor(outputs, [&](const at::Tensor& tensor, int, int) { set_lasting(tensor, inputs); });
}

void written_in_graph(
    const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> outputs) {
  RecordedGraph* graph = open_graph();
  if (graph == nullptr) return;
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (info.forgets_all || info.written[static_cast<size_t>(argument)])
      graph->written->add(tensor);
  });
  each_tensor(outputs, [&](const at::Tensor& tensor, int, int) { graph->written->add(tensor); });
}

void written_in_graph(const at::Tensor& tensor) {
  if (RecordedGraph* graph = open_graph()) graph->written->add(tensor);
}

}  // namespace prismscale
