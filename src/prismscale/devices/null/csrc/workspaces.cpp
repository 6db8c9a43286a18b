// Memory that CUDA kernels take from the caching allocator while they run and that no tensor of the
// program shows. It counts towards peaks.
#include "fallback.h"

#include <algorithm>

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

// Gradient of an embedding over more than 3,072 indices (EmbeddingBackwardKernel.cu): indices are
// sorted, and rows of one index are summed in parts of ten, in float32, before they are put together.
// The sort's own temporary storage holds keys and values once more.
std::vector<size_t> embedding_backward(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& grad = arguments[0].toTensor();
  const at::Tensor& indices = arguments[1].toTensor();
  const int64_t rows = indices.numel(), weights = arguments[2].toInt();
  if (rows <= 3072 || grad.numel() == 0) return {};
  const int64_t segments = std::min(rows, weights), parts = rows / 10 + segments;
  const size_t index_bytes = static_cast<size_t>(indices.itemsize());
  const size_t list = static_cast<size_t>(rows) * index_bytes;
  const size_t sum_bytes = std::max<size_t>(static_cast<size_t>(grad.itemsize()), sizeof(float));
  return {list,  // sorted
          list,  // where each was
          2 * list,
          list,  // where segments begin
          static_cast<size_t>(segments) * index_bytes,
          static_cast<size_t>(segments) * index_bytes,
          static_cast<size_t>(parts) * index_bytes,
          static_cast<size_t>(parts) * rounded(grad.size(-1), 32) * sum_bytes};
}

}  // namespace

std::vector<size_t> hidden_workspaces(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  if (info.name == "aten::_scaled_dot_product_flash_attention_backward") {
    return flash_backward(arguments);
  }
  if (info.name == "aten::_scaled_dot_product_cudnn_attention_backward") {
    return cudnn_backward(arguments);
  }
  if (info.name == "aten::embedding_dense_backward") return embedding_backward(arguments);
  return {};
}

}  // namespace prismscale
