// Memory that torch's reductions take from the caching allocator while they run. A reduction that
// splits its input over thread blocks stages every thread's part in global memory
// (ATen/native/cuda/Reduce.cuh, setReduceConfig and global_memory_size): up to 142 MB for the
// gradient of a bias on an H100, whatever the size of the result. And an input whose type is not
// that of the sum is copied first.
#include <ATen/AccumulateType.h>
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <unordered_map>

#include "device.h"
#include "fallback.h"

namespace prismscale {
namespace {

constexpr int64_t kThreads = 512, kWarp = 32, kThreadsPerMultiprocessor = 2048;
constexpr int64_t kFewValues = 16, kManyValues = 256;  // per thread
constexpr int64_t kVector = 4;
constexpr int64_t kLargestOffset = 0x7fffffff;

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t power_of_two_below(int64_t value) {
  int64_t power = 1;
  while (power * 2 <= value) power *= 2;
  return power;
}

// The type in which a thread accumulates.
enum class Accumulator { kSum, kSame, kWithPosition, kMoments, kBool };

struct Rule {
  size_t dims;  // index of the argument with the dimensions
  Accumulator accumulator;
  size_t dtype = 0;  // index of the argument with the result's type; 0: there is none
};

const std::unordered_map<std::string, Rule>& rules() {
  using enum Accumulator;
  static const auto* known = new std::unordered_map<std::string, Rule>{
      {"aten::sum.dim_IntList", {1, kSum, 3}},
      {"aten::sum.IntList_out", {1, kSum, 3}},
      {"aten::nansum", {1, kSum, 3}},
      {"aten::mean.dim", {1, kSum, 3}},
      {"aten::mean.out", {1, kSum, 3}},
      {"aten::prod.dim_int", {1, kSum, 3}},
      {"aten::linalg_vector_norm", {2, kSum}},
      {"aten::linalg_vector_norm.out", {2, kSum}},
      {"aten::norm.ScalarOpt_dim", {2, kSum}},
      {"aten::amax", {1, kSame}},
      {"aten::amax.out", {1, kSame}},
      {"aten::amin", {1, kSame}},
      {"aten::amin.out", {1, kSame}},
      {"aten::max.dim", {1, kWithPosition}},
      {"aten::min.dim", {1, kWithPosition}},
      {"aten::argmax", {1, kWithPosition}},
      {"aten::argmin", {1, kWithPosition}},
      {"aten::var.correction", {1, kMoments}},
      {"aten::std.correction", {1, kMoments}},
      {"aten::var_mean.correction", {1, kMoments}},
      {"aten::any.dim", {1, kBool}},
      {"aten::all.dim", {1, kBool}},
  };
  return *known;
}

struct Axis {
  int64_t size, stride, out_stride;  // strides in elements
};

// The loops of TensorIterator: innermost first, without loops of one step, merged where possible.
struct Loops {
  std::vector<Axis> reduced, kept;
  int64_t input_bytes, output_bytes, accumulator_bytes;
};

int64_t steps(const std::vector<Axis>& axes) {
  int64_t product = 1;
  for (const Axis& axis : axes) product *= axis.size;
  return product;
}

void merge(std::vector<Axis>& axes) {
  size_t last = 0;
  for (size_t i = 1; i < axes.size(); ++i) {
    Axis& inner = axes[last];
    if (inner.size * inner.stride == axes[i].stride &&
        inner.size * inner.out_stride == axes[i].out_stride) {
      inner.size *= axes[i].size;
    } else {
      axes[++last] = axes[i];
    }
  }
  if (!axes.empty()) axes.resize(last + 1);
}

Loops loops_of(const at::Tensor& self, const std::vector<bool>& is_reduced) {
  Loops loops{};
  int64_t out_stride = 1;
  for (int64_t dim = self.dim() - 1; dim >= 0; --dim) {
    const int64_t size = self.size(dim);
    if (size == 1) continue;
    if (is_reduced[static_cast<size_t>(dim)]) {
      loops.reduced.push_back({size, self.stride(dim), 0});
    } else {
      loops.kept.push_back({size, self.stride(dim), out_stride});
      out_stride *= size;
    }
  }
  // The output orders the kept dimensions, the input the reduced ones.
  std::stable_sort(loops.reduced.begin(), loops.reduced.end(),
                   [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  merge(loops.reduced);
  merge(loops.kept);
  return loops;
}

bool fits_32_bits(const Loops& loops) {
  int64_t in = 1, out = 1;
  for (const auto* axes : {&loops.reduced, &loops.kept}) {
    for (const Axis& axis : *axes) {
      in += (axis.size - 1) * axis.stride * loops.input_bytes;
      out += (axis.size - 1) * axis.out_stride * loops.output_bytes;
    }
  }
  return std::max(in, out) <= kLargestOffset &&
      steps(loops.reduced) * steps(loops.kept) <= kLargestOffset;
}

// How many outputs a thread computes from one load, if neighbours belong to different outputs.
int64_t outputs_per_load(const Loops& loops) {
  int64_t vector = kVector;
  const auto limit = [&](int64_t n) {
    while (n % vector != 0) vector /= 2;
  };
  limit(loops.kept[0].size);
  for (const Axis& axis : loops.reduced) limit(axis.stride);
  for (size_t i = 1; i < loops.kept.size(); ++i) limit(loops.kept[i].stride);
  return vector;
}

// Bytes of staging and of semaphores; empty if each block reads all inputs of its outputs.
std::vector<size_t> staged(const Loops& loops, int64_t multiprocessors) {
  const int64_t outputs = steps(loops.kept), inputs = steps(loops.reduced);
  const bool along_input =
      loops.kept.empty() || loops.reduced[0].stride < loops.kept[0].stride;
  int64_t dim0 = along_input ? inputs : outputs, dim1 = along_input ? outputs : inputs;
  int64_t vector = 1;
  if ((along_input ? loops.reduced[0] : loops.kept[0]).stride == 1) {
    if (!along_input) {
      vector = outputs_per_load(loops);
      dim0 /= vector;
    } else if (dim0 >= 128 && loops.reduced.size() == 1) {
      dim0 /= kVector;
    }
  }
  const int64_t most = kThreads / vector;
  const int64_t wide = power_of_two_below(std::min(dim0, most));
  int64_t width = std::min(wide, kWarp);
  const int64_t height = std::min(power_of_two_below(std::min(dim1, most)), most / width);
  width = std::min(wide, most / height);

  int64_t input_step = along_input ? width : 1;
  const int64_t output_step = along_input ? 1 : width;
  if (div_up(inputs, input_step) < std::min(height * kFewValues, kManyValues)) return {};
  input_step *= height;  // warps of a block share an output
  const int64_t values = div_up(inputs, input_step);
  const int64_t grid = div_up(outputs / vector, output_step);
  const int64_t target = multiprocessors * (kThreadsPerMultiprocessor / (width * height));
  if (values < kManyValues || grid > target) return {};
  const int64_t blocks = std::max(
      std::min(div_up(target, grid), div_up(values, kFewValues)), div_up(values, kManyValues));
  if (blocks <= 1) return {};
  int64_t bytes = loops.accumulator_bytes * outputs * blocks;
  if (!along_input) bytes *= width * vector;
  return {static_cast<size_t>(bytes), static_cast<size_t>(grid * 4)};
}

// If offsets need more than 32 bits, the longest axis is halved, and the parts are reduced one
// after the other.
std::vector<size_t> largest_part(const Loops& loops, int64_t multiprocessors) {
  if (fits_32_bits(loops)) return staged(loops, multiprocessors);
  Loops half = loops;
  Axis* longest = nullptr;
  for (auto* axes : {&half.reduced, &half.kept}) {
    for (Axis& axis : *axes) {
      if (longest == nullptr ||
          (axis.size - 1) * axis.stride > (longest->size - 1) * longest->stride)
        longest = &axis;
    }
  }
  longest->size -= longest->size / 2;
  return largest_part(half, multiprocessors);
}

std::vector<bool> reduced_dims(const c10::IValue& argument, int64_t rank) {
  std::vector<bool> reduced(static_cast<size_t>(rank), false);
  const auto mark = [&](int64_t dim) {
    reduced[static_cast<size_t>(at::maybe_wrap_dim(dim, rank))] = true;
  };
  if (argument.isInt()) {
    mark(argument.toInt());
  } else if (argument.isIntList() && !argument.toIntVector().empty()) {
    for (const int64_t dim : argument.toIntVector()) mark(dim);
  } else {
    reduced.assign(reduced.size(), true);
  }
  return reduced;
}

// Type of the result. A sum's input is converted to it unless the kernel itself reads 16 bits.
at::ScalarType result_type(const Rule& rule, const at::Tensor& self,
                           c10::ArrayRef<c10::IValue> arguments) {
  if (rule.dtype == 0) return self.scalar_type();
  if (arguments.back().isTensor()) return arguments.back().toTensor().scalar_type();
  if (!arguments[rule.dtype].isNone()) return arguments[rule.dtype].toScalarType();
  return at::isIntegralType(self.scalar_type(), true) ? at::kLong : self.scalar_type();
}

int64_t accumulator_bytes(Accumulator accumulator, at::ScalarType type) {
  const auto bytes = [](at::ScalarType of) { return static_cast<int64_t>(c10::elementSize(of)); };
  switch (accumulator) {
    case Accumulator::kSum: return bytes(at::toAccumulateType(type, c10::DeviceType::CUDA));
    case Accumulator::kSame: return bytes(type);
    case Accumulator::kWithPosition: return 16;  // a value and its position, aligned
    case Accumulator::kMoments: return type == at::kDouble ? 32 : 16;
    case Accumulator::kBool: break;
  }
  return 1;
}

bool reads_16_bits(at::ScalarType from, at::ScalarType to) {
  return (from == at::kHalf || from == at::kBFloat16) && to == at::kFloat;
}

}  // namespace

std::vector<size_t> reduction_workspaces(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const auto found = rules().find(info.name);
  if (found == rules().end()) return {};
  const Rule& rule = found->second;
  const at::Tensor& self = arguments[0].toTensor();
  if (self.numel() == 0 || self.dim() == 0 || self.is_complex()) return {};
  const at::ScalarType to = result_type(rule, self, arguments);
  const bool copied = to != self.scalar_type() && !reads_16_bits(self.scalar_type(), to);
  std::vector<size_t> bytes;
  if (copied) bytes.push_back(static_cast<size_t>(self.numel()) * c10::elementSize(to));

  const at::ScalarType type = copied ? to : self.scalar_type();
  Loops loops = loops_of(self, reduced_dims(arguments[rule.dims], self.dim()));
  if (loops.reduced.empty()) return bytes;
  loops.input_bytes = static_cast<int64_t>(c10::elementSize(type));
  loops.output_bytes = static_cast<int64_t>(c10::elementSize(to));
  loops.accumulator_bytes = accumulator_bytes(rule.accumulator, type);
  if (!fits_32_bits(loops) && loops.output_bytes == 2) {
    // The parts are added up in 32 bits.
    bytes.push_back(static_cast<size_t>(steps(loops.kept) * loops.accumulator_bytes));
  }
  for (const size_t more : largest_part(loops, device(0).multiprocessors())) bytes.push_back(more);
  return bytes;
}

}  // namespace prismscale
