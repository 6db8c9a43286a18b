// Memory that CUDA kernels take from the caching allocator while they run and that no tensor of the
// program shows. It counts towards peaks.
#include "fallback.h"

namespace prismscale {
namespace {

size_t rounded(int64_t value, int64_t multiple) {
  return static_cast<size_t>((value + multiple - 1) / multiple * multiple);
}

// FlashAttention-2 backward (torch's flash_attn, mha_bwd): a float32 accumulator of dQ and the
// row sums dP, both over the query length rounded to 128; with grouped queries also dK and dV
// expanded to all query heads. Arguments: grad, q, k, v with shape (batch, heads, length, dim).
std::vector<size_t> flash_backward(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& q = arguments[1].toTensor();
  const at::Tensor& k = arguments[2].toTensor();
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), dim = q.size(3);
  const size_t length_rounded = rounded(length, 128);
  const size_t dim_rounded = dim <= 128 ? rounded(dim, 32) : rounded(dim, 64);
  const size_t rows = static_cast<size_t>(batch * heads) * length_rounded;
  std::vector<size_t> bytes{rows * sizeof(float), rows * dim_rounded * sizeof(float)};
  if (k.size(1) != heads) {
    const size_t expanded =
        static_cast<size_t>(batch * k.size(2) * heads * dim) * static_cast<size_t>(q.itemsize());
    bytes.push_back(expanded);
    bytes.push_back(expanded);
  }
  return bytes;
}

// cuDNN's backward (cudnn-frontend's graph of it): the same accumulators, without rounding.
std::vector<size_t> cudnn_backward(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& q = arguments[1].toTensor();
  const at::Tensor& k = arguments[2].toTensor();
  const auto rows = static_cast<size_t>(q.size(0) * q.size(1) * q.size(2));
  std::vector<size_t> bytes{rows * sizeof(float),
                            rows * static_cast<size_t>(q.size(3)) * sizeof(float)};
  if (k.size(1) != q.size(1)) {
    const size_t expanded = static_cast<size_t>(q.size(0) * q.size(1) * k.size(2) * q.size(3)) *
        static_cast<size_t>(q.itemsize());
    bytes.push_back(expanded);
    bytes.push_back(expanded);
  }
  return bytes;
}

}  // namespace

std::vector<size_t> hidden_workspaces(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  if (info.name == "aten::_scaled_dot_product_flash_attention_backward") {
    return flash_backward(arguments);
  }
  if (info.name == "aten::_scaled_dot_product_cudnn_attention_backward") {
    return cudnn_backward(arguments);
  }
  return {};
}

}  // namespace prismscale
