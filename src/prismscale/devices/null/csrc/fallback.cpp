// Boxed fallback: takes output metadata from the Meta kernel once per distinct call, then from a
// cache.
#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>

namespace prismscale {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;
using Results = c10::SmallVector<IValue, 4>;

CostCallback g_cost = nullptr;
int64_t g_default_device_ns = 0, g_default_host_ns = 0;

std::unordered_map<CallKey, std::unique_ptr<CallEntry>, CallKeyHash>& cache() {
  static auto* entries =
      new std::unordered_map<CallKey, std::unique_ptr<CallEntry>, CallKeyHash>();
  return *entries;
}
std::mutex g_cache_mutex;

at::Tensor to_meta(const at::Tensor& tensor) {
  // A wrapped Python number stays real: it decides type promotion, and Python meta kernels unwrap
  // it.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::Tensor(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

IValue to_meta(const IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(to_meta(value.toTensor())) : value;
  }
  if (value.isDevice()) return IValue(c10::Device(c10::DeviceType::Meta));
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? to_meta(t) : t);
    return list;
  }
  if (is_optional_tensor_list(value)) {
    c10::List<std::optional<at::Tensor>> list;
    for (const IValue& item : value.toListRef()) {
      // A slice before an index (`x[:, ids]`) arrives as an undefined tensor, not as an absent one.
      const bool is_there = item.isTensor() && item.toTensor().defined();
      list.push_back(is_there ? std::optional<at::Tensor>(to_meta(item.toTensor())) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Meta kernels may be Python. In this scope the program's autograd, autocast, torch-function modes
// and profiler do not see them.
class MetaScope {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  at::DisableRecordFunctionGuard unseen_;
  at::impl::TorchFunctionDisabledState previous_ =
      at::impl::PythonTorchFunctionTLS::get_disabled_state();

 public:
  MetaScope() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~MetaScope() { at::impl::PythonTorchFunctionTLS::set_disabled_state(previous_); }
};

// Whether the op returns its last arguments, as an `out` variant does, or nothing, as fused
// optimizers do.
bool returns_arguments(const OpInfo& info, size_t count) {
  if (count > info.arguments) return false;
  for (size_t i = info.arguments - count; i < info.arguments; ++i) {
    if (!info.overwritten[i]) return false;
  }
  return true;
}

void run_meta(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack) {
  const MetaScope scope;
  const Stack arguments = stack;
  try {
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    const size_t returned = op.schema().returns().size();
    if (returns_arguments(info, returned)) {
      // Some ops of both kinds have no Meta kernel. Compiled code gives `out` the right shape.
      stack.assign(arguments.end() - static_cast<std::ptrdiff_t>(returned), arguments.end());
      return;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "The null CUDA device has no shape rule for ", info.name,
        ": torch has no Meta kernel for it. Give it one with torch.library.register_fake(\"",
        info.name, "\", function), which returns empty tensors of the right shape. Its time is "
        "that of the bytes it touches, or comes from prismscale run --kernels FILE.");
  }
}

OutputTensor output_of(
    const at::Tensor& result,
    const std::unordered_map<const c10::TensorImpl*, std::pair<int, int>>& origin) {
  OutputTensor out;
  if (!result.defined()) {
    out.kind = OutputTensor::kUndefined;
    return out;
  }
  const auto found = origin.find(result.unsafeGetTensorImpl());
  if (found != origin.end()) {
    out.kind = OutputTensor::kArgument;
    std::tie(out.argument, out.item) = found->second;
    return out;
  }
  out.sizes.assign(result.sizes().begin(), result.sizes().end());
  out.strides.assign(result.strides().begin(), result.strides().end());
  out.dtype = result.scalar_type();
  return out;
}

void set_cost(CallEntry& entry, const std::string& description) {
  entry.cost = cost_of(description);
}

std::unique_ptr<CallEntry> make_entry(
    const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<IValue> arguments) {
  auto entry = std::make_unique<CallEntry>();
  Stack stack;
  for (const IValue& argument : arguments) stack.push_back(to_meta(argument));
  std::unordered_map<const c10::TensorImpl*, std::pair<int, int>> origin;
  std::vector<at::Tensor> metas;  // keeps the arguments alive: the kernel consumes the stack
  each_tensor(stack, [&](const at::Tensor& tensor, int argument, int item) {
    origin[tensor.unsafeGetTensorImpl()] = {argument, item};
    metas.push_back(tensor);
  });
  if (info.fills_self) {
    stack.resize(1);
  } else {
    run_meta(op, info, stack);
  }

  bool small = true, fits_host = true;
  const auto measure = [&](const at::Tensor& t) {
    small &= t.numel() <= kShadowElements;
    fits_host &= static_cast<size_t>(t.numel()) * t.itemsize() <= kHostBytes;
  };
  for (const IValue& value : stack) {
    Output out;
    if (value.isTensor()) {
      out.tensors.push_back(output_of(value.toTensor(), origin));
    } else if (value.isTensorList()) {
      out.kind = Output::kTensors;
      for (const at::Tensor& t : value.toTensorVector())
        out.tensors.push_back(output_of(t, origin));
    } else {
      out.kind = Output::kConstant;
      out.constant = value;
    }
    entry->outputs.push_back(std::move(out));
  }
  each_tensor(stack, [&](const at::Tensor& t, int, int) { measure(t); });
  size_t next = 0;
  each_tensor(arguments, [&](const at::Tensor& before, int argument, int item) {
    const at::Tensor& after = metas[next++];
    measure(before);
    measure(after);
    if (info.written[static_cast<size_t>(argument)] && after.sizes() != before.sizes()) {
      OutputTensor resized = output_of(after, {});
      resized.argument = argument;
      resized.item = item;
      entry->resized.push_back(std::move(resized));
    }
  });
  entry->small = small;
  entry->fits_host = fits_host;
  entry->workspaces = hidden_workspaces(info, arguments);
  const std::string description = describe_call(op, info, arguments, stack);
  set_cost(*entry, description);
  entry->id = register_signature(description);
  return entry;
}

CallEntry& find_entry(
    const c10::OperatorHandle& op, const OpInfo& info, const CallKey& key,
    c10::ArrayRef<IValue> arguments) {
  {
    std::lock_guard<std::mutex> lock(g_cache_mutex);
    const auto found = cache().find(key);
    if (found != cache().end()) return *found->second;
  }
  // Not under the lock: Python meta kernels take the GIL, and a thread that holds the GIL may want
  // this lock.
  auto entry = make_entry(op, info, arguments);
  std::lock_guard<std::mutex> lock(g_cache_mutex);
  return *cache().try_emplace(key, std::move(entry)).first->second;
}

at::Tensor argument_tensor(c10::ArrayRef<IValue> arguments, const OutputTensor& out) {
  const IValue& value = arguments[static_cast<size_t>(out.argument)];
  if (out.item < 0) return value.toTensor();
  return value.toListRef()[static_cast<size_t>(out.item)].toTensor();
}

at::Tensor make_output(c10::ArrayRef<IValue> arguments, const OutputTensor& out, int device) {
  switch (out.kind) {
    case OutputTensor::kArgument:
      return argument_tensor(arguments, out);
    case OutputTensor::kUndefined:
      return {};
    default:
      return new_tensor(out.sizes, out.strides, out.dtype, device);
  }
}

void apply_resizes(c10::ArrayRef<IValue> arguments, const CallEntry& entry) {
  for (const OutputTensor& out : entry.resized) {
    const at::Tensor tensor = argument_tensor(arguments, out);
    auto* impl = tensor.unsafeGetTensorImpl();
    const size_t needed = at::detail::computeStorageNbytes(
        out.sizes, out.strides, impl->itemsize(), static_cast<size_t>(impl->storage_offset()));
    if (needed > tensor.storage().nbytes()) {
      resize_storage(tensor.storage().unsafeGetStorageImpl(), needed);
    }
    impl->set_sizes_and_strides(out.sizes, out.strides);
  }
}

Results make_outputs(c10::ArrayRef<IValue> arguments, const CallEntry& entry, int device) {
  Results outputs;
  for (const Output& out : entry.outputs) {
    if (out.kind == Output::kTensor) {
      outputs.emplace_back(make_output(arguments, out.tensors.front(), device));
    } else if (out.kind == Output::kConstant) {
      outputs.push_back(out.constant);
    } else {
      c10::List<at::Tensor> list;
      for (const OutputTensor& t : out.tensors) list.push_back(make_output(arguments, t, device));
      outputs.emplace_back(std::move(list));
    }
  }
  return outputs;
}

// Allocates all workspaces before it frees them: the kernel holds them at the same time.
void use_workspaces(const CallEntry& entry, int index, int64_t stream) {
  std::vector<Block*> held;
  for (const size_t bytes : entry.workspaces) held.push_back(device(index).malloc(bytes, stream));
  for (Block* block : held) device(index).free(block);
}

}  // namespace

CallCost cost_of(const std::string& description) {
  CallCost cost{g_default_device_ns, g_default_host_ns, 0};
  if (g_cost != nullptr) {
    g_cost(description.c_str(), &cost.device_ns, &cost.host_ns, &cost.busy_ns);
  }
  return cost;
}

void set_cost_callback(CostCallback callback, int64_t device_ns, int64_t host_ns) {
  g_cost = callback;
  g_default_device_ns = device_ns;
  g_default_host_ns = host_ns;
  std::vector<CallEntry*> entries;
  {
    std::lock_guard<std::mutex> lock(g_cache_mutex);
    for (auto& [key, entry] : cache()) entries.push_back(entry.get());
  }
  for (CallEntry* entry : entries) set_cost(*entry, signature_text(entry->id));
}

namespace {

const c10::OperatorHandle& operator_named(const std::string& name) {
  static auto* known = new std::unordered_map<std::string, c10::OperatorHandle>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = known->find(name);
  if (found != known->end()) return found->second;
  const size_t dot = name.find('.');
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      ("aten::" + name.substr(0, dot)).c_str(),
      dot == std::string::npos ? "" : name.c_str() + dot + 1);
  return known->emplace(name, op).first->second;
}

}  // namespace

void charge(const char* name, std::vector<IValue> arguments, std::vector<IValue> outputs) {
  const c10::OperatorHandle& op = operator_named(name);
  const OpInfo& info = op_info(op);
  // Callers may leave out arguments at the end that do not matter for the cost.
  while (arguments.size() < info.arguments) arguments.emplace_back();
  CallScan scan = scan_call(info, arguments);
  // The result's shape depends on values, so it belongs to the key.
  each_tensor(outputs, [&](const at::Tensor& tensor, int, int) {
    scan.key.add(23);
    for (const int64_t size : tensor.sizes()) scan.key.add(static_cast<uint64_t>(size));
  });
  CallEntry* entry = nullptr;
  {
    std::lock_guard<std::mutex> lock(g_cache_mutex);
    const auto found = cache().find(scan.key);
    if (found != cache().end()) entry = found->second.get();
  }
  if (entry == nullptr) {
    auto made = std::make_unique<CallEntry>();
    const std::string description = describe_call(op, info, arguments, outputs);
    set_cost(*made, description);  // Python: not under the lock, see find_entry
    made->id = register_signature(description);
    std::lock_guard<std::mutex> lock(g_cache_mutex);
    entry = cache().try_emplace(scan.key, std::move(made)).first->second.get();
  }
  const int index = scan.device < 0 ? current_device() : scan.device;
  const int64_t stream = current_stream(index);
  const int64_t start_ns = device(index).launch(stream, entry->id, entry->cost);
  record_op(entry->id, index, stream, start_ns, entry->cost.device_ns);
}

void null_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const OpInfo& info = op_info(op);
  const size_t first = stack->size() - info.arguments;
  const c10::ArrayRef<IValue> arguments(stack->data() + first, info.arguments);
  const CallScan scan = scan_call(info, arguments);
  TORCH_CHECK(!scan.foreign_cpu || info.allows_cpu,
      "Expected all tensors to be on the same device, but found at least two devices, cuda:",
      scan.device, " and cpu! (when checking arguments of ", info.name, ")");
  const int index = scan.device < 0 ? current_device() : scan.device;
  const int64_t stream = current_stream(index);
  CallEntry& entry = find_entry(op, info, scan.key, arguments);

  set_current_op(entry.id);
  if (!entry.resized.empty()) apply_resizes(arguments, entry);
  if (info.uses_blas) device(index).use_blas(stream);
  Results outputs = make_outputs(arguments, entry, index);
  if (!entry.workspaces.empty()) use_workspaces(entry, index, stream);
  const bool is_captured = device(index).is_capturing(stream);
  GraphInputs inputs;
  const bool exact = info.exactable && !entry.cpu_fails &&
      (entry.small || (entry.fits_host && follows_from_host(info, arguments))) &&
      (!is_captured || repeats_in_graph(info, arguments, inputs)) &&
      run_exact(op, info, entry, arguments, outputs);
  if (!exact && (info.writes || info.forgets_all)) forget_written(info, arguments);
  if (is_captured) {
    if (exact) set_lasting(info, arguments, outputs, inputs);
    written_in_graph(info, arguments, outputs);
  }
  const int64_t start_ns = device(index).launch(stream, entry.id, entry.cost);
  record_op(entry.id, index, stream, start_ns, entry.cost.device_ns);

  torch::jit::drop(*stack, info.arguments);
  for (IValue& output : outputs) stack->push_back(std::move(output));
}

}  // namespace prismscale
