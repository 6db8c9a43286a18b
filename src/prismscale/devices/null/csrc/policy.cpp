// Ops whose result depends on values: data-dependent shapes, histograms, finiteness.
#include "policy.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_unique2_native.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/bincount_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/nonzero_native.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/repeat_interleave_native.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "fallback.h"
#include "registration.h"

namespace prismscale {

AnswerCallback g_answer = nullptr;
std::vector<double> g_routing;   // relative loads, one per bin of a histogram, or one per rank
bool g_routing_of_ranks = false;  // per rank: each rank's load is spread evenly over its bins
double g_routing_exponent = 0.0;  // other histograms: bin i, from 1, has the load i to minus this

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
  for (size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return new_tensor(sizes, strides, dtype, index);
}

Tensor known_on_cuda(const Tensor& value, int index) {
  Tensor tensor = new_contiguous(value.sizes(), value.scalar_type(), index);
  set_known(tensor, value);
  return tensor;
}

// The sum of a tensor whose elements are `each` on average.
int64_t marks_in(const Tensor& tensor, double each) {
  return static_cast<int64_t>(each * static_cast<double>(tensor.numel()) + 0.5);
}

Tensor positions_in(const Tensor& self) {
  const int index = self.get_device();
  if (const auto known = known_value(self)) {
    return known_on_cuda(at::native::nonzero_cpu(*known), index);
  }
  const auto uniform = uniform_value(self);
  const int64_t count = uniform
      ? marks_in(self, std::min(1.0, *uniform))  // of counts it is their mean
      : ask_count("aten::nonzero", self.numel());
  return new_contiguous({count, self.dim()}, at::kLong, index);
}

// Charges op `name` for `result`, which one of our own kernels has made. If its shape depends on
// values, the host waits for it, as it does with a GPU.
Tensor charged(const char* name, std::vector<c10::IValue> arguments, Tensor result,
               bool host_waits = true) {
  charge(name, std::move(arguments), {result});
  const int index = result.get_device();
  if (host_waits) device(index).synchronize_stream(current_stream(index));
  return result;
}

Tensor positions_of(const Tensor& self) { return charged("nonzero", {self}, positions_in(self)); }

Tensor select_masked(const Tensor& self, const Tensor& mask) {
  const auto elements = std::accumulate(
      mask.sizes().begin(), mask.sizes().end(), int64_t{1}, std::multiplies<int64_t>());
  const auto shape = at::infer_size(self.sizes(), mask.sizes());
  const int64_t all = c10::multiply_integers(shape);
  const Tensor rows = positions_of(mask);
  const int64_t count = elements == 0 ? 0 : rows.size(0) * (all / elements);
  return charged("masked_select", {self, mask},
                 new_contiguous({count}, self.scalar_type(), self.get_device()), false);
}

std::tuple<Tensor, Tensor, Tensor> unique_of(
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

std::tuple<Tensor, Tensor, Tensor> unique(
    const Tensor& self, bool sorted, bool inverse, bool counts) {
  auto found = unique_of(self, sorted, inverse, counts);
  charged("_unique2", {self}, std::get<0>(found));
  return found;
}

Tensor interleaved(const Tensor& repeats, std::optional<c10::SymInt> output_size) {
  const int index = repeats.get_device();
  if (const auto known = known_value(repeats)) {
    return known_on_cuda(at::native::repeat_interleave_cpu(*known, std::nullopt), index);
  }
  const auto each = uniform_value(repeats);
  const int64_t size = output_size
      ? output_size->guard_int(__FILE__, __LINE__)
      : each ? marks_in(repeats, *each)
             : ask_count("aten::repeat_interleave.Tensor", repeats.numel());
  return new_contiguous({size}, repeats.scalar_type(), index);
}

Tensor interleave(const Tensor& repeats, std::optional<c10::SymInt> output_size) {
  const bool host_waits = !output_size.has_value();
  return charged("repeat_interleave.Tensor", {repeats},
                 interleaved(repeats, std::move(output_size)), host_waits);
}

// Spreads `total` elements over the bins by the user's routing.
Tensor spread(int64_t total, int64_t bins, at::ScalarType dtype) {
  std::vector<double> load(static_cast<size_t>(bins));
  for (size_t i = 0; i < load.size(); ++i) {
    load[i] = std::pow(static_cast<double>(i + 1), -g_routing_exponent);
  }
  const auto loads = static_cast<int64_t>(g_routing.size());
  if (loads == bins) load = g_routing;
  if (g_routing_of_ranks && loads > 0 && bins % loads == 0) {
    for (int64_t i = 0; i < bins; ++i) {
      load[static_cast<size_t>(i)] = g_routing[static_cast<size_t>(i / (bins / loads))];
    }
  }
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
  set_known(result, spread(elements, result.numel(), result.scalar_type()), true);
}

Tensor counted_bins(
    const Tensor& self, const std::optional<Tensor>& weights, const c10::SymInt& minlength) {
  const int index = self.get_device();
  const int64_t bins = std::max<int64_t>(minlength.guard_int(__FILE__, __LINE__), 1);
  if (const auto known = known_value(self); known && !(weights && weights->defined())) {
    return known_on_cuda(at::native::_bincount_cpu(*known, {}, bins), index);
  }
  const bool weighted = weights && weights->defined();
  const auto dtype = !weighted ? at::kLong
      : weights->scalar_type() == at::kFloat ? at::kFloat : at::kDouble;
  const Tensor result = new_contiguous({bins}, dtype, index);
  ask("aten::bincount", Question::kHistogram, self.numel());
  if (!weighted && bins <= kShadowElements) {
    set_known(result, spread(self.numel(), bins, dtype), true);
  }
  return result;
}

// The host waits: the largest element decides how many bins there are.
Tensor count_bins(const Tensor& self, const std::optional<Tensor>& weights, c10::SymInt minlength) {
  return charged("bincount", {self}, counted_bins(self, weights, minlength));
}

// First turns boolean masks among the indices into positions, as the CUDA kernel does.
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

// The number of rows that a program writes through a mask tells how many elements of the mask are
// true. The mask remembers it, so that later counts, as in the backward pass, agree.
void note_rows(const Tensor& self, const c10::IValue& indices, const Tensor& values) {
  const auto given = indices.toListRef();
  if (given.size() != 1 || !given[0].isTensor()) return;
  const Tensor& mask = given[0].toTensor();
  const bool is_rows = mask.defined() && mask.scalar_type() == at::kBool &&
      values.dim() == self.dim() - mask.dim() + 1 && values.size(0) > 1;
  if (!is_rows || known_value(mask)) return;
  const Allocation* allocation = allocation_of(mask);
  if (allocation == nullptr || allocation->uniform) return;
  set_share(mask, static_cast<double>(values.size(0)) / static_cast<double>(mask.numel()));
}

void index_put_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  const Tensor self = torch::jit::peek(*stack, 0, arguments).toTensor();
  const bool accumulates = torch::jit::peek(*stack, 3, arguments).toBool();
  const auto share = accumulates
      ? std::nullopt
      : indexed_share(self, torch::jit::peek(*stack, 1, arguments));
  note_rows(self, torch::jit::peek(*stack, 1, arguments),
            torch::jit::peek(*stack, 2, arguments).toTensor());
  index_kernel(op, keys, stack);
  if (share) set_share(self, *share);
}

// Gives a mask of any size one value. Masks of finite elements are uniform: the numbers of a
// healthy run are finite.
void set_uniform(const Tensor& mask, bool value) {
  if (mask.numel() <= kShadowElements) {
    set_known(mask, at::native::full(mask.sizes(), value, at::kBool, at::kStrided, at::kCPU));
  }
  if (Allocation* allocation = allocation_of(mask)) allocation->uniform = value;
}

// Marks a mask as uniform. It has been made by the operators that a GPU runs, with their
// temporaries.
Tensor uniform_mask(const Tensor& mask, bool value) {
  if (!known_value(mask)) set_uniform(mask, value);
  return mask;
}

Tensor is_finite(const Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!self.is_floating_point()) return at::ones_like(self, at::kBool);
  const Tensor same = self.eq(self);
  return uniform_mask(same.mul(self.abs().ne(std::numeric_limits<double>::infinity())), true);
}

Tensor is_inf(const Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!self.is_floating_point()) return at::zeros_like(self, at::kBool);
  return uniform_mask(self.abs().eq(std::numeric_limits<double>::infinity()), false);
}

Tensor is_nan(const Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return uniform_mask(self.ne(self), false);
}

// all, any, sum and count_nonzero of a uniform mask are known, whatever its size.
template <bool kCounts>
void reduction_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  null_kernel(op, keys, stack);
  const auto uniform = uniform_value(self);
  if (!uniform || self.scalar_type() != at::kBool) return;
  const Tensor result = stack->back().toTensor();
  if (result.numel() == 0 || known_value(result)) return;
  const double share = *uniform;
  const double times = kCounts ? static_cast<double>(self.numel() / result.numel()) : 1.0;
  if (result.numel() > kShadowElements) {
    if (kCounts) set_share(result, share * times);  // on average
    return;
  }
  if (kCounts && share > 0.0 && share < 1.0) {
    const Tensor counts = spread(marks_in(self, share), result.numel(), result.scalar_type());
    set_known(result, counts.view(result.sizes()), true);
    return;
  }
  set_known(result, at::native::full(result.sizes(), share * times, result.scalar_type(),
                                     at::kStrided, at::kCPU));
}

// `all` of unknown values is a check, which a healthy run passes. It is answered when the host
// reads it.
void all_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  reduction_kernel<false>(op, keys, stack);
  const Tensor result = stack->back().toTensor();
  Allocation* allocation = is_null(result) ? allocation_of(result) : nullptr;
  if (allocation != nullptr && !known_value(result)) allocation->is_check = true;
}

// Gradient unscaling finds nothing infinite, so found_inf keeps its value.
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
  implement("nonzero", TORCH_FN(positions_of));
  implement("masked_select", TORCH_FN(select_masked));
  implement("_unique2", TORCH_FN(unique));
  implement("repeat_interleave.Tensor", TORCH_FN(interleave));
  implement("bincount", TORCH_FN(count_bins));
  implement("isfinite", TORCH_FN(is_finite));
  implement("isinf", TORCH_FN(is_inf));
  implement("isnan", TORCH_FN(is_nan));
  using torch::CppFunction;
  implement("histc", CppFunction::makeFromBoxedFunction<&histogram_kernel>());
  implement("index.Tensor", CppFunction::makeFromBoxedFunction<&index_kernel>());
  implement("_index_put_impl_", CppFunction::makeFromBoxedFunction<&index_kernel>());
  implement("index_put_", CppFunction::makeFromBoxedFunction<&index_put_kernel>());
  for (const char* name : {"all", "all.dim"}) {
    implement(name, CppFunction::makeFromBoxedFunction<&all_kernel>());
  }
  for (const char* name : {"any", "any.dim"}) {
    implement(name, CppFunction::makeFromBoxedFunction<&reduction_kernel<false>>());
  }
  for (const char* name : {"sum", "sum.dim_IntList", "count_nonzero.dim_IntList"}) {
    implement(name, CppFunction::makeFromBoxedFunction<&reduction_kernel<true>>());
  }
  register_routing_kernels();
  implement("_amp_foreach_non_finite_check_and_unscale_",
        CppFunction::makeFromBoxedFunction<&unscale_kernel>());
}

}  // namespace prismscale

extern "C" {
#pragma GCC visibility push(default)

void ps_set_answer(prismscale::AnswerCallback callback) { prismscale::g_answer = callback; }

void ps_set_routing(const double* load, int64_t bins, bool of_ranks, double exponent) {
  prismscale::g_routing.assign(load, load + bins);
  prismscale::g_routing_of_ranks = of_ranks;
  prismscale::g_routing_exponent = exponent;
}

#pragma GCC visibility pop
}  // extern "C"
