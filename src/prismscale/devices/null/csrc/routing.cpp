// Routing maps: which tokens an expert gets is data, how many it gets is a policy.
//
// A program marks k of E columns of every row by scattering ones into a map of zeros. With
// deterministic algorithms it uses index_put_ instead, and the map may be of floats. The map's
// allocation then remembers the share of marks, k / E, and so do copies and casts of the map. Ops
// that count marks (sum, nonzero, masked_select) use that share, so that all counts agree.
//
// Indices of experts, of which some are -1 because the expert lives elsewhere (DeepEP), carry the
// share of the others. A mask of these (`indices != -1`) is a routing map.

#include <ATen/ExpandUtils.h>

#include <algorithm>

#include "fallback.h"
#include "policy.h"
#include "registration.h"

namespace prismscale {
namespace {

using at::Tensor;
using torch::jit::Stack;

bool holds_marks(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || at::isIntegralType(tensor.scalar_type(), false);
}

// Another overload takes the value as a tensor of one element, but programs mark with a number.
void scatter_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  const Tensor self = torch::jit::peek(*stack, 0, arguments).toTensor();
  const int64_t dim = torch::jit::peek(*stack, 1, arguments).toInt();
  const Tensor index = torch::jit::peek(*stack, 2, arguments).toTensor();
  const at::Scalar value = torch::jit::peek(*stack, 3, arguments).toScalar();
  null_kernel(op, keys, stack);
  const Tensor result = stack->back().toTensor();
  if (!holds_marks(result) || value.to<double>() != 1.0 || index.dim() != self.dim() ||
      self.numel() == 0 || known_value(result)) {
    return;
  }
  Allocation* allocation = allocation_of(result);
  if (allocation == nullptr) return;
  const auto marked = static_cast<double>(index.size(dim));
  allocation->uniform = std::min(1.0, marked / static_cast<double>(self.size(dim)));
}

// `indices != -1` and `indices >= 0`.
template <int64_t kAbsent>
void valid_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, 2).toTensor();
  const at::Scalar than = torch::jit::peek(*stack, 1, 2).toScalar();
  null_kernel(op, keys, stack);
  const auto share = uniform_value(self);
  const bool is_index = at::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  if (!share || !is_index || than.to<double>() != static_cast<double>(kAbsent)) return;
  set_share(stack->back().toTensor(), std::min(1.0, *share));  // of counts it is their mean
}

}  // namespace

std::optional<double> indexed_share(const Tensor& map, const c10::IValue& indices) {
  if (map.dim() != 2 || map.numel() == 0) return std::nullopt;
  std::vector<Tensor> given;
  for (const c10::IValue& index : indices.toListRef()) {
    if (!index.isTensor() || !at::isIntegralType(index.toTensor().scalar_type(), false)) {
      return std::nullopt;
    }
    given.push_back(index.toTensor());
  }
  if (given.size() != 2) return std::nullopt;
  double marked = 1.0;
  for (const int64_t size : at::infer_size(given[0].sizes(), given[1].sizes())) {
    marked *= static_cast<double>(size);
  }
  return std::min(1.0, marked / static_cast<double>(map.numel()));
}

void set_share(const Tensor& map, double share) {
  if (known_value(map)) return;
  if (Allocation* allocation = allocation_of(map)) allocation->uniform = share;
}

void copy_share(const Tensor& to, const Tensor& from) {
  if (!is_null(to) || !is_null(from) || known_value(to)) return;
  const auto share = uniform_value(from);
  if (!share || !holds_marks(to)) return;
  const bool whole = static_cast<size_t>(to.numel() * to.itemsize()) >= to.storage().nbytes();
  if (Allocation* target = whole ? allocation_of(to) : nullptr) target->uniform = share;
}

void register_routing_kernels() {
  using torch::CppFunction;
  implement("ne.Scalar", CppFunction::makeFromBoxedFunction<&valid_kernel<-1>>());
  implement("ge.Scalar", CppFunction::makeFromBoxedFunction<&valid_kernel<0>>());
  for (const char* name : {"scatter.value", "scatter_.value"}) {
    implement(name, CppFunction::makeFromBoxedFunction<&scatter_kernel>());
  }
}

}  // namespace prismscale
