// Which attention kernel scaled_dot_product_attention takes: torch's rules for compute capability 8
// and newer (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), as far as they depend on dtype,
// shape, mask and the user's sdpa_kernel() choice.
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "fallback.h"
#include "policy.h"

namespace prismscale {
namespace {

using at::SDPBackend;
using at::Tensor;

struct Query {
  const Tensor &q, &k, &v;
  bool masked;
};

bool half_precision(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

bool one_head_size(const Query& s) {
  return s.q.size(-1) == s.k.size(-1) && s.q.size(-1) == s.v.size(-1);
}

bool flash_can(const Query& s) {
  return s.q.dim() == 4 && half_precision(s.q) && !s.masked && one_head_size(s) &&
      s.q.size(-1) <= 256;
}

bool efficient_can(const Query& s) {
  const bool dtype = half_precision(s.q) || s.q.scalar_type() == at::kFloat;
  const int64_t alignment = half_precision(s.q) ? 8 : 4;
  return s.q.dim() == 4 && dtype && s.q.size(1) == s.k.size(1) &&
      s.q.size(-1) % alignment == 0 && s.v.size(-1) % alignment == 0;
}

bool cudnn_can(const Query& s) {
  return s.q.dim() == 4 && half_precision(s.q) && s.q.size(-1) % 8 == 0 && s.q.size(-1) <= 128;
}

int64_t fused_sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v,
                         const std::optional<Tensor>& mask, double, bool, std::optional<double>,
                         bool) {
  const auto& context = at::globalContext();
  const Query query{q, k, v, mask.has_value() && mask->defined()};
  for (const SDPBackend backend : at::globalContext().sDPPriorityOrder()) {
    const bool chosen =
        (backend == SDPBackend::flash_attention && context.userEnabledFlashSDP() &&
         flash_can(query)) ||
        (backend == SDPBackend::efficient_attention && context.userEnabledMemEfficientSDP() &&
         efficient_can(query)) ||
        (backend == SDPBackend::cudnn_attention && context.userEnabledCuDNNSDP() &&
         cudnn_can(query)) ||
        (backend == SDPBackend::math && context.userEnabledMathSDP());
    if (chosen) return static_cast<int64_t>(backend);
  }
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}

}  // namespace

void register_attention_choice() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
  // scaled_dot_product_attention itself asks the stub, not the dispatcher.
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fused_sdp_choice);
}

}  // namespace prismscale
