// Values computed from constants: small ops are repeated on the CPU, on the storages' shadows.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

#include "fallback.h"
#include "graph_capture.h"

namespace prismscale {

bool covers_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() &&
      static_cast<size_t>(tensor.numel()) * tensor.itemsize() == tensor.storage().nbytes();
}

namespace {

using c10::IValue;

c10::Storage blank_shadow(size_t bytes) {
  c10::Storage shadow(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), false);
  std::memset(shadow.mutable_data(), 0, bytes);
  return shadow;
}

at::Tensor on_shadow(
    const at::Tensor& tensor, const c10::Storage& shadow, size_t offset_bytes = 0) {
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(shadow), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = cpu.unsafeGetTensorImpl();
  const size_t offset = offset_bytes / tensor.itemsize();
  impl->set_storage_offset(tensor.storage_offset() + static_cast<int64_t>(offset));
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return cpu;
}

bool is_plain(const at::Tensor& tensor) { return !tensor.is_conj() && !tensor.is_neg(); }

size_t most_bytes(bool from_host) { return from_host ? kHostBytes : kShadowBytes; }

// Gives a storage without a shadow a blank one; false if it would be too large.
bool give_shadow(Allocation& allocation, bool from_host) {
  if (allocation.bytes > most_bytes(from_host)) return false;
  if (from_host && !take_host_bytes(allocation.bytes)) return false;
  allocation.from_host = from_host;
  allocation.shadow = blank_shadow(allocation.bytes);
  return true;
}

// Makes the CPU stand-in of one argument; false if its value is unknown.
bool stand_in(const at::Tensor& tensor, bool overwritten, bool from_host, at::Tensor& cpu) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    cpu = tensor;
    return true;
  }
  if (!is_plain(tensor)) return false;
  Allocation* allocation = allocation_of(tensor);
  if (allocation == nullptr) {
    if (tensor.numel() > 0) {  // made from a foreign pointer
      const LeftValue left = left_value(tensor);
      if (left.shadow) cpu = on_shadow(tensor, left.shadow, left.offset);
      return static_cast<bool>(left.shadow);
    }
    cpu = at::Tensor(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(),
                                                   tensor.scalar_type()));
    return true;
  }
  if (!allocation->shadow) {
    if (!overwritten || !covers_storage(tensor)) return false;
    if (!give_shadow(*allocation, from_host)) return false;
  }
  cpu = on_shadow(tensor, allocation->shadow);
  return true;
}

bool stand_in(const IValue& value, bool overwritten, bool from_host, IValue& cpu) {
  if (value.isTensor()) {
    at::Tensor tensor;
    if (!stand_in(value.toTensor(), overwritten, from_host, tensor)) return false;
    cpu = tensor;
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorVector()) {
      at::Tensor tensor;
      if (!stand_in(item, overwritten, from_host, tensor)) return false;
      list.push_back(tensor);
    }
    cpu = list;
  } else if (value.isDevice()) {
    cpu = c10::Device(c10::DeviceType::CPU);
  } else if (is_optional_tensor_list(value)) {
    c10::List<std::optional<at::Tensor>> list;
    for (const IValue& item : value.toListRef()) {
      at::Tensor tensor;
      if (item.isTensor() && !stand_in(item.toTensor(), overwritten, from_host, tensor)) {
        return false;
      }
      list.push_back(item.isTensor() ? std::optional<at::Tensor>(tensor) : std::nullopt);
    }
    cpu = list;
  } else {
    cpu = value;
  }
  return true;
}

void keep(const at::Tensor& output, const at::Tensor& value, bool from_host) {
  if (!is_null(output) || !value.defined()) return;
  Allocation* allocation = allocation_of(output);
  if (allocation == nullptr) return;
  if (!allocation->shadow && !give_shadow(*allocation, from_host)) return;
  on_shadow(output, allocation->shadow).copy_(value);
}

// Whether all values are known. Checked before arguments that are only written get blank shadows.
bool all_known(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, bool from_host) {
  bool known = true;
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (!known || !tensor.is_cuda()) return;
    const Allocation* allocation = allocation_of(tensor);
    if (allocation == nullptr || allocation->shadow) return;
    known = info.overwritten[static_cast<size_t>(argument)] &&
        allocation->bytes <= most_bytes(from_host) && covers_storage(tensor);
  });
  return known;
}

bool are_numbers(const IValue& tensors) {
  const auto list = tensors.toListRef();
  return !list.empty() && std::all_of(list.begin(), list.end(), [&](const IValue& item) {
    const at::Tensor& tensor = item.toTensor();
    return is_null(tensor) && tensor.numel() == 1 && is_plain(tensor) &&
        tensor.scalar_type() == list[0].toTensor().scalar_type();
  });
}

// The place of a known number in its storage's shadow.
char* number_in(const IValue& value) {
  const at::Tensor& tensor = value.toTensor();
  auto* bytes = static_cast<char*>(allocation_of(tensor)->shadow.mutable_data());
  return bytes + static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
}

// Runs the op on all numbers as one tensor. A fused optimizer counts the steps of each parameter in
// a tensor of its own. The CPU would take these one by one, at several times the cost of any other
// op of the step.
void run_on_numbers(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const auto list = arguments[0].toListRef();
  const at::Tensor& first = list[0].toTensor();
  at::Tensor all = at::detail::empty_cpu({static_cast<int64_t>(list.size())}, first.scalar_type());
  auto* bytes = static_cast<char*>(all.mutable_data_ptr());
  const size_t width = first.itemsize();
  for (size_t i = 0; i < list.size(); ++i)
    std::memcpy(bytes + i * width, number_in(list[i]), width);
  torch::jit::Stack stack{c10::List<at::Tensor>({all}), arguments[1]};
  op.callBoxed(stack);
  for (size_t i = 0; i < list.size(); ++i)
    std::memcpy(number_in(list[i]), bytes + i * width, width);
}

// Dispatches below autograd and autocast, where the op itself already is.
class KernelScope {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace

bool follows_from_host(const OpInfo& info, c10::ArrayRef<IValue> arguments) {
  bool follows = false, makes_integers = false, makes_only = true;
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    const bool is_made = info.overwritten[static_cast<size_t>(argument)];
    makes_only &= is_made;
    makes_integers |= is_made && at::isIntegralType(tensor.scalar_type(), false);
    if (tensor.is_cpu()) {
      follows |= tensor.dim() > 0;
    } else if (const Allocation* allocation = allocation_of(tensor)) {
      follows |= allocation->from_host;
    }
  });
  return follows || (makes_integers && makes_only);
}

bool run_exact(const c10::OperatorHandle& op, const OpInfo& info, CallEntry& entry,
               c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> outputs) {
  const bool from_host = follows_from_host(info, arguments);
  if (!all_known(info, arguments, from_host)) return false;
  torch::jit::Stack stack;
  const bool together = info.counts && are_numbers(arguments[0]);
  for (size_t i = 0; i < arguments.size() && !together; ++i) {
    IValue cpu;
    if (!stand_in(arguments[i], info.overwritten[i], from_host, cpu)) return false;
    stack.push_back(std::move(cpu));
  }
  try {
    const KernelScope scope;
    if (together) {
      run_on_numbers(op, arguments);
    } else {
      op.callBoxed(stack);
    }
  } catch (const c10::Error&) {
    entry.cpu_fails = true;  // no such CPU kernel: attention variants, low-precision formats
    return false;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].isTensor()) {
      keep(outputs[i].toTensor(), stack[i].toTensor(), from_host);
    } else if (outputs[i].isTensorList()) {
      const auto values = stack[i].toTensorVector();
      const auto tensors = outputs[i].toTensorVector();
      for (size_t j = 0; j < tensors.size(); ++j) keep(tensors[j], values[j], from_host);
    }
  }
  return true;
}

void forget(const at::Tensor& tensor) {
  if (!is_null(tensor)) return;
  if (Allocation* allocation = allocation_of(tensor)) {
    if (allocation->from_host) give_host_bytes(allocation->bytes);
    allocation->from_host = false;
    allocation->shadow = c10::Storage();
    allocation->uniform.reset();
    allocation->is_check = false;
  } else if (tensor.numel() > 0) {
    forget_left(tensor);
  }
}

void forget_written(const OpInfo& info, c10::ArrayRef<IValue> arguments) {
  each_tensor(arguments, [&](const at::Tensor& tensor, int argument, int) {
    if (info.forgets_all || info.written[static_cast<size_t>(argument)]) forget(tensor);
  });
}

std::optional<double> uniform_value(const at::Tensor& tensor) {
  if (!is_null(tensor)) return std::nullopt;
  if (const Allocation* allocation = allocation_of(tensor)) return allocation->uniform;
  return left_value(tensor).uniform;
}

std::optional<at::Tensor> known_value(const at::Tensor& tensor) {
  if (!is_null(tensor)) return tensor;
  // In a capture the answer would hold for all replays, but this value depends on the graph's
  // inputs.
  const RecordedGraph* graph = open_graph();
  const Allocation* allocation = graph == nullptr ? nullptr : allocation_of(tensor);
  if (allocation != nullptr && allocation->lasts_in == graph->id && allocation->made_of) {
    return std::nullopt;
  }
  at::Tensor cpu;
  if (!stand_in(tensor, false, false, cpu)) return std::nullopt;
  return cpu;
}

bool set_known(const at::Tensor& tensor, const at::Tensor& value, bool from_host) {
  at::Tensor cpu;
  if (tensor.numel() > kShadowElements || !stand_in(tensor, true, from_host, cpu)) {
    forget(tensor);
    return false;
  }
  cpu.copy_(value);
  const int index = tensor.get_device();
  if (open_graph() != nullptr && device(index).is_capturing(current_stream(index)))
    set_lasting(tensor);
  return true;
}

}  // namespace prismscale
