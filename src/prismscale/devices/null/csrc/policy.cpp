// Ops whose result depends on values: data-dependent shapes, histograms, finiteness.
#include "policy.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_unique2_native.h>
#include <ATen/ops/bincount_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/full_native.h>
#include <ATen/ops/isfinite_native.h>
#include <ATen/ops/isinf_native.h>
#include <ATen/ops/nonzero_native.h>
#include <ATen/ops/repeat_interleave_native.h>
#include <torch/library.h>

#include <numeric>

#include "fallback.h"

namespace prismscale {

AnswerCallback g_answer = nullptr;
std::vector<double> g_routing;  // relative load of histogram bins; empty: uniform

double ask(const char* op, Question question, int64_t elements) {
  if (g_answer != nullptr) return g_answer(op, static_cast<int>(question), elements);
  if (question == Question::kBoolean) return 0.0;
  return question == Question::kCount ? static_cast<double>(elements) : 1.0;
}

namespace {

using at::Tensor;
using torch::jit::Stack;

int64_t ask_count(const char* op, int64_t elements) {
  return static_cast<int64_t>(ask(op, Question::kCount, elements));
}

Tensor new_contiguous(at::IntArrayRef sizes, at::ScalarType dtype, int index) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return new_tensor(sizes, strides, dtype, index);
}

Tensor known_on_cuda(const Tensor& value, int index) {
  Tensor tensor = new_contiguous(value.sizes(), value.scalar_type(), index);
  set_known(tensor, value);
  return tensor;
}

Tensor positions_of(const Tensor& self) {
  const int index = self.get_device();
  device(index).synchronize_stream(current_stream(index));  // the host needs the count
  if (const auto known = known_value(self)) {
    return known_on_cuda(at::native::nonzero_cpu(*known), index);
  }
  const Allocation* allocation = allocation_of(self);
  const int64_t count = allocation != nullptr && allocation->uniform
      ? static_cast<int64_t>(*allocation->uniform * static_cast<double>(self.numel()) + 0.5)
      : ask_count("aten::nonzero", self.numel());
  return new_contiguous({count, self.dim()}, at::kLong, index);
}

Tensor select_masked(const Tensor& self, const Tensor& mask) {
  const auto elements = std::accumulate(
      mask.sizes().begin(), mask.sizes().end(), int64_t{1}, std::multiplies<int64_t>());
  const auto shape = at::infer_size(self.sizes(), mask.sizes());
  const int64_t all = c10::multiply_integers(shape);
  const Tensor rows = positions_of(mask);
  const int64_t count = elements == 0 ? 0 : rows.size(0) * (all / elements);
  return new_contiguous({count}, self.scalar_type(), self.get_device());
}

std::tuple<Tensor, Tensor, Tensor> unique(
    const Tensor& self, bool sorted, bool inverse, bool counts) {
  const int index = self.get_device();
  if (const auto known = known_value(self)) {
    auto [values, where, times] = at::native::_unique2_cpu(*known, sorted, inverse, counts);
    return {known_on_cuda(values, index), known_on_cuda(where, index), known_on_cuda(times, index)};
  }
  const int64_t count = ask_count("aten::_unique2", self.numel());
  return {new_contiguous({count}, self.scalar_type(), index),
          new_contiguous(inverse ? self.sizes() : at::IntArrayRef{0}, at::kLong, index),
          new_contiguous({counts ? count : 0}, at::kLong, index)};
}

Tensor interleave(const Tensor& repeats, std::optional<c10::SymInt> output_size) {
  const int index = repeats.get_device();
  if (const auto known = known_value(repeats)) {
    return known_on_cuda(at::native::repeat_interleave_cpu(*known, std::nullopt), index);
  }
  const int64_t size = output_size
      ? output_size->guard_int(__FILE__, __LINE__)
      : ask_count("aten::repeat_interleave.Tensor", repeats.numel());
  return new_contiguous({size}, repeats.scalar_type(), index);
}

// `total` elements over the bins: by the user's routing where it has as many bins, else evenly.
Tensor spread(int64_t total, int64_t bins, at::ScalarType dtype) {
  std::vector<double> load(static_cast<size_t>(bins), 1.0);
  if (static_cast<int64_t>(g_routing.size()) == bins) load = g_routing;
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  auto counts = at::native::empty_cpu({bins}, at::kLong);
  auto* out = counts.mutable_data_ptr<int64_t>();
  // Rounding the running sum keeps the total exact.
  double running = 0.0;
  int64_t given = 0;
  for (int64_t i = 0; i < bins; ++i) {
    running += load[static_cast<size_t>(i)];
    const auto upto = static_cast<int64_t>(running / sum * static_cast<double>(total) + 0.5);
    out[i] = upto - given;
    given = upto;
  }
  return counts.to(dtype);
}

void histogram_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const int64_t elements =
      torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor().numel();
  null_kernel(op, keys, stack);
  const Tensor result = stack->back().toTensor();
  if (known_value(result) || result.numel() > kShadowElements) return;
  ask("aten::histc", Question::kHistogram, elements);
  set_known(result, spread(elements, result.numel(), result.scalar_type()));
}

Tensor count_bins(const Tensor& self, const std::optional<Tensor>& weights, c10::SymInt minlength) {
  const int index = self.get_device();
  const int64_t bins = std::max<int64_t>(minlength.guard_int(__FILE__, __LINE__), 1);
  if (const auto known = known_value(self); known && !(weights && weights->defined())) {
    return known_on_cuda(at::native::_bincount_cpu(*known, {}, bins), index);
  }
  const bool weighted = weights && weights->defined();
  const auto dtype = !weighted ? at::kLong : weights->scalar_type() == at::kFloat ? at::kFloat : at::kDouble;
  const Tensor result = new_contiguous({bins}, dtype, index);
  ask("aten::bincount", Question::kHistogram, self.numel());
  if (!weighted && bins <= kShadowElements) set_known(result, spread(self.numel(), bins, dtype));
  return result;
}

// Boolean masks among the indices become positions first, as the CUDA kernel does.
void index_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto& slot = torch::jit::peek(*stack, 1, op.schema().arguments().size());
  c10::List<std::optional<Tensor>> expanded;
  bool masked = false;
  for (const c10::IValue& item : slot.toListRef()) {
    if (!item.isTensor() || !item.toTensor().defined()) {
      expanded.push_back(std::nullopt);
      continue;
    }
    const Tensor& indices = item.toTensor();
    if (indices.scalar_type() != at::kBool && indices.scalar_type() != at::kByte) {
      expanded.push_back(indices);
      continue;
    }
    masked = true;
    const Tensor positions = indices.nonzero();
    for (int64_t dim = 0; dim < indices.dim(); ++dim) expanded.push_back(positions.select(1, dim));
  }
  if (masked) slot = expanded;
  null_kernel(op, keys, stack);
}

// Real numbers of a healthy run are finite: a mask of any size with one value.
void set_uniform(const Tensor& mask, bool value) {
  if (mask.numel() <= kShadowElements) {
    set_known(mask, at::native::full(mask.sizes(), value, at::kBool, at::kStrided, at::kCPU));
  }
  if (Allocation* allocation = allocation_of(mask)) allocation->uniform = value;
}

template <bool kValue>
Tensor finiteness(const Tensor& self) {
  const Tensor mask = new_contiguous(self.sizes(), at::kBool, self.get_device());
  if (const auto known = known_value(self); known && self.numel() <= kShadowElements) {
    set_known(mask, kValue ? at::native::isfinite(*known) : at::native::isinf(*known));
    return mask;
  }
  set_uniform(mask, kValue);
  return mask;
}

Tensor mask_of_nan(const Tensor& self) {
  const auto known = known_value(self);
  if (!known || self.numel() > kShadowElements) return finiteness<false>(self);
  const Tensor mask = new_contiguous(self.sizes(), at::kBool, self.get_device());
  set_known(mask, known->ne(*known));
  return mask;
}

// all, any, sum and count_nonzero of a uniform mask are known, whatever its size.
template <bool kCounts>
void reduction_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  null_kernel(op, keys, stack);
  const Allocation* allocation = is_null(self) ? allocation_of(self) : nullptr;
  if (allocation == nullptr || !allocation->uniform || self.scalar_type() != at::kBool) return;
  const Tensor result = stack->back().toTensor();
  if (result.numel() == 0 || result.numel() > kShadowElements || known_value(result)) return;
  const double share = *allocation->uniform;
  if (kCounts && share > 0.0 && share < 1.0) {
    const auto marks = static_cast<int64_t>(share * static_cast<double>(self.numel()) + 0.5);
    set_known(result, spread(marks, result.numel(), result.scalar_type()).view(result.sizes()));
    return;
  }
  const double times = kCounts ? static_cast<double>(self.numel() / result.numel()) : 1.0;
  set_known(result, at::native::full(result.sizes(), share * times, result.scalar_type(),
                                     at::kStrided, at::kCPU));
}

// Gradient unscaling finds nothing infinite: found_inf stays what it was.
void unscale_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor found_inf = torch::jit::peek(*stack, 1, 3).toTensor();
  const auto known = known_value(found_inf);
  const Tensor before = known ? known->clone() : at::native::full(
      found_inf.sizes(), 0.0, found_inf.scalar_type(), at::kStrided, at::kCPU);
  ask("aten::_amp_foreach_non_finite_check_and_unscale_", Question::kFoundInf, found_inf.numel());
  null_kernel(op, keys, stack);
  set_known(found_inf, before);
}

}  // namespace

void register_policy_kernels() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("nonzero", TORCH_FN(positions_of));
  library->impl("masked_select", TORCH_FN(select_masked));
  library->impl("_unique2", TORCH_FN(unique));
  library->impl("repeat_interleave.Tensor", TORCH_FN(interleave));
  library->impl("bincount", TORCH_FN(count_bins));
  library->impl("isfinite", TORCH_FN(finiteness<true>));
  library->impl("isinf", TORCH_FN(finiteness<false>));
  library->impl("isnan", TORCH_FN(mask_of_nan));
  const auto boxed = [&](const char* name, torch::CppFunction&& kernel) {
    library->impl(name, std::move(kernel));
  };
  using torch::CppFunction;
  boxed("histc", CppFunction::makeFromBoxedFunction<&histogram_kernel>());
  boxed("index.Tensor", CppFunction::makeFromBoxedFunction<&index_kernel>());
  boxed("_index_put_impl_", CppFunction::makeFromBoxedFunction<&index_kernel>());
  boxed("index_put_", CppFunction::makeFromBoxedFunction<&index_kernel>());
  for (const char* name : {"all", "all.dim", "any", "any.dim"}) {
    boxed(name, CppFunction::makeFromBoxedFunction<&reduction_kernel<false>>());
  }
  for (const char* name : {"sum", "sum.dim_IntList", "count_nonzero.dim_IntList"}) {
    boxed(name, CppFunction::makeFromBoxedFunction<&reduction_kernel<true>>());
  }
  register_routing_kernels();
  boxed("_amp_foreach_non_finite_check_and_unscale_",
        CppFunction::makeFromBoxedFunction<&unscale_kernel>());
}

}  // namespace prismscale

extern "C" {
#pragma GCC visibility push(default)

void ps_set_answer(prismscale::AnswerCallback callback) { prismscale::g_answer = callback; }

void ps_set_routing(const double* load, int64_t bins) {
  prismscale::g_routing.assign(load, load + bins);
}

#pragma GCC visibility pop
}  // extern "C"
