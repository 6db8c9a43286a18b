// Chooses the kernel of scaled_dot_product_attention by the rules of torch's builds for compute
// capability 8 and newer with cuDNN 9.15 or later (aten/src/ATen/native/transformers/cuda/
// sdp_utils.cpp), as far as they depend on dtype, shape, mask, dropout and the user's
// sdpa_kernel().
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>

#include <cmath>
#include <cstdlib>
#include <string_view>

#include "fallback.h"
#include "policy.h"
#include "registration.h"

namespace prismscale {
namespace {

using at::SDPBackend;
using at::Tensor;

int g_major = 8, g_minor = 0;

struct Query {
  const Tensor &q, &k, &v;
  bool masked, causal;
  double dropout;
};

bool half_precision(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

bool one_head_size(const Query& s) {
  return s.q.size(-1) == s.k.size(-1) && s.q.size(-1) == s.v.size(-1);
}

bool flash_can(const Query& s) {
  return s.q.dim() == 4 && half_precision(s.q) && !s.masked && one_head_size(s) &&
      s.q.size(-1) <= 256 && !(s.causal && s.q.size(2) != s.k.size(2));
}

bool efficient_can(const Query& s) {
  const bool dtype = half_precision(s.q) || s.q.scalar_type() == at::kFloat;
  const int64_t alignment = half_precision(s.q) ? 8 : 4;
  return s.q.dim() == 4 && dtype && s.q.size(1) == s.k.size(1) &&
      s.q.size(-1) % alignment == 0 && s.v.size(-1) % alignment == 0;
}

// Head sizes of up to 256 on Hopper; 192 with values of 128 (DeepSeek) on Blackwell; else up to
// 128.
bool cudnn_takes_heads(int64_t qk, int64_t v) {
  if (qk % 8 != 0 || v % 8 != 0) return false;
  if (g_major == 10 && qk == 192 && v == 128) return true;
  const int64_t most = g_major == 9 && g_minor == 0 ? 256 : 128;
  return qk <= most && v <= most;
}

bool cudnn_can(const Query& s) {
  const bool shapes = s.q.dim() == 4 && half_precision(s.q) && s.k.size(2) > 1 &&
      std::max(s.q.size(0), s.q.size(1)) <= 65'535 &&
      cudnn_takes_heads(s.q.size(-1), s.v.size(-1));
  const bool dropout = s.dropout * 16.0 == std::floor(s.dropout * 16.0);
  return shapes && dropout && !(s.causal && s.q.size(2) != s.k.size(2)) && !sums_in_fixed_order();
}

// torch sets this order when it first chooses; sdpa_kernel(set_priority=True) changes it later.
void prefer_cudnn_once() {
  [[maybe_unused]] static const bool asked = [] {
    const char* text = std::getenv("TORCH_CUDNN_SDPA_DEPRIORITIZED");
    const bool deprioritized = text != nullptr && std::string_view(text) == "1";
    if (!deprioritized && (g_major == 9 || g_major == 10) && g_minor == 0) {
      std::vector<int64_t> order;
      for (const SDPBackend backend : {SDPBackend::cudnn_attention, SDPBackend::flash_attention,
                                       SDPBackend::efficient_attention, SDPBackend::math}) {
        order.push_back(static_cast<int64_t>(backend));
      }
      at::globalContext().setSDPPriorityOrder(order);
    }
    return true;
  }();
}

int64_t fused_sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v,
                         const std::optional<Tensor>& mask, double dropout, bool causal,
                         std::optional<double>, bool) {
  prefer_cudnn_once();
  const auto& context = at::globalContext();
  const Query query{q, k, v, mask.has_value() && mask->defined(), causal, dropout};
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

void set_capability(int major, int minor) {
  g_major = major;
  g_minor = minor;
}

void register_attention_choice() {
  implement("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
  // scaled_dot_product_attention itself calls the stub, not the dispatcher.
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fused_sdp_choice);
}

}  // namespace prismscale
