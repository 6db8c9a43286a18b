// Memory that CUDA kernels take from the caching allocator while they run. No tensor of the program
// shows it, but it counts towards peaks.
#include <ATen/Context.h>
#include <ATen/WrapDimUtils.h>

#include <algorithm>

#include "device.h"
#include "fallback.h"

namespace prismscale {
namespace {

size_t rounded(int64_t value, int64_t multiple) {
  return static_cast<size_t>((value + multiple - 1) / multiple * multiple);
}

// FlashAttention-2 backward (torch's flash_attn, mha_bwd): a float32 accumulator of dQ and the
// row sums dP, both over the query length rounded to 128; with grouped queries also dK and dV
// expanded to all query heads. If the program wants determinism, there are as many accumulators as
// let every multiprocessor add to its own. Arguments: grad, q, k, v with shape (batch, heads,
// length, dim).
std::vector<size_t> flash_backward(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& q = arguments[1].toTensor();
  const at::Tensor& k = arguments[2].toTensor();
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), dim = q.size(3);
  const size_t length_rounded = rounded(length, 128);
  const size_t dim_rounded = dim <= 128 ? rounded(dim, 32) : rounded(dim, 64);
  const size_t rows = static_cast<size_t>(batch * heads) * length_rounded;
  const auto all = static_cast<size_t>(device(q.get_device()).multiprocessors());
  const size_t pairs = std::max<size_t>(1, static_cast<size_t>(batch * heads));
  const size_t splits = sums_in_fixed_order() ? (all + pairs - 1) / pairs : 1;
  std::vector<size_t> bytes{rows * sizeof(float), splits * rows * dim_rounded * sizeof(float)};
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

// Gradient of an embedding over more than 3,072 indices (EmbeddingBackwardKernel.cu). Indices are
// sorted. Rows of one index are summed in float32 in parts of ten, and then the parts are combined.
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
  return {list,  // sorted indices
          list,  // their original positions
          2 * list,
          list,  // where segments begin
          static_cast<size_t>(segments) * index_bytes,
          static_cast<size_t>(segments) * index_bytes,
          static_cast<size_t>(parts) * index_bytes,
          static_cast<size_t>(parts) * rounded(grad.size(-1), 32) * sum_bytes};
}

// Tile sizes of the efficient attention kernels for capability 8 and newer
// (mem_eff_attention/kernels/ cutlassB.h): rows of queries by rows of keys. They depend on the
// larger head size.
struct Tiles {
  int64_t queries, keys;
};
Tiles efficient_tiles(int64_t dim) {
  if (dim <= 64) return {64, 64};
  return {128, dim <= 128 ? 128 : 64};
}

// Efficient attention keeps its output in registers for head sizes of up to 128. Above that it has
// a float32 accumulator, unless the output is float32 itself. Arguments: q, k, v of (batch, heads,
// length, dim).
std::vector<size_t> efficient_forward(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& q = arguments[0].toTensor();
  const at::Tensor& v = arguments[2].toTensor();
  if (v.size(-1) <= 128 || q.itemsize() >= 4) return {};
  return {static_cast<size_t>(q.size(0) * q.size(1) * q.size(2) * v.size(-1)) * sizeof(float)};
}

// The backward pass of efficient attention (kernel_backward.h). It has row sums and a float32
// accumulator of dQ by tiles, where each tile has a lock and a counter of 16 bytes together. For
// 16-bit heads of more than 128 it also has parts of dK and dV for each split of the keys: at most
// 200 splits over all heads, or one split if the program wants determinism. Arguments: grad, q, k,
// v of (batch, heads, length, dim).
std::vector<size_t> efficient_backward(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& q = arguments[1].toTensor();
  const at::Tensor& k = arguments[2].toTensor();
  const at::Tensor& v = arguments[3].toTensor();
  const int64_t pairs = q.size(0) * q.size(1), length = q.size(2), keys = k.size(2);
  if (pairs == 0 || length == 0 || keys == 0) return {};
  const int64_t dim = q.size(-1), value_dim = v.size(-1), most = std::max(dim, value_dim);
  const Tiles tiles = efficient_tiles(most);
  const auto rows = rounded(length, tiles.queries), columns = rounded(dim, tiles.keys);
  const size_t n_tiles = rows / tiles.queries * (columns / tiles.keys);
  size_t each = rows * columns * sizeof(float) + n_tiles * 16;
  if (most > 128 && q.itemsize() < 4) {
    const bool one = at::globalContext().deterministicAlgorithms();
    const int64_t splits =
        one ? 1 : std::max<int64_t>(1, std::min((keys + 63) / 64, 200 / pairs));
    const size_t wide = rounded(dim, tiles.queries) + rounded(value_dim, tiles.queries);
    each += static_cast<size_t>(splits * tiles.keys) * wide * sizeof(float);
  }
  const size_t sums = static_cast<size_t>(pairs * length) * sizeof(float);
  size_t bytes = static_cast<size_t>(pairs) * each;
  if (q.itemsize() >= 4) {
    // Here torch's own product and sum make the row sums before the kernel.
    bytes = std::max(bytes, static_cast<size_t>(pairs * length * value_dim) * sizeof(float));
  }
  return {sums, bytes};
}

// A sort along more than 4,096 elements uses cub (Sort.cpp, SortStable.cu). It takes the initial
// positions, and keys and values once more. A few long rows are sorted as one, with their row
// numbers. Other cub calls of torch (cumsum, nonzero, reductions) take a few bytes for thousands of
// elements.
std::vector<size_t> sort(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  if (self.dim() == 0 || self.numel() == 0) return {};
  const int64_t dim = at::maybe_wrap_dim(arguments[2].toInt(), self.dim());
  const int64_t length = self.size(dim), rows = self.numel() / length;
  if (length <= 4096) return {};
  const auto all = static_cast<size_t>(self.numel());
  const auto row = static_cast<size_t>(length);
  const size_t key = self.itemsize(), position = sizeof(int64_t);
  if (rows == 1 || length >= 1'000'000) return {row * position, row * (key + position)};
  if (rows < 128) return {all * position, all * position, all * key, all * (key + position)};
  return {all * position, all * (key + position)};
}

}  // namespace

std::vector<size_t> hidden_workspaces(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  if (info.name == "aten::_scaled_dot_product_flash_attention_backward") {
    return flash_backward(arguments);
  }
  if (info.name == "aten::_scaled_dot_product_cudnn_attention_backward") {
    return cudnn_backward(arguments);
  }
  if (info.name == "aten::_scaled_dot_product_efficient_attention") {
    return efficient_forward(arguments);
  }
  if (info.name == "aten::_scaled_dot_product_efficient_attention_backward") {
    return efficient_backward(arguments);
  }
  if (info.name == "aten::sort.stable") return sort(arguments);
  if (info.name == "aten::embedding_dense_backward") return embedding_backward(arguments);
  return reduction_workspaces(info, arguments);
}

}  // namespace prismscale
