// The one way by which kernels of the null device reach the dispatcher.
#pragma once

#include <torch/library.h>

namespace prismscale {

void implement_kernel(const char* name, torch::CppFunction&& kernel);

// Give the aten operator `name` ("add.Tensor") this kernel on CUDA, over torch's own where this is a
// CUDA build. The first kernel that a name is given here stays.
template <typename Kernel>
void implement(const char* name, Kernel&& kernel) {
  implement_kernel(name, torch::CppFunction(std::forward<Kernel>(kernel)));
}

// [Note: no kernel of a GPU is reached] Every operator for which a CUDA build has a kernel gets the
// boxed one, whatever its namespace; so do the names in `cuda_ops`, which a CPU build lacks. What is
// left falls back to it. Operators on sparse, quantized and nested CUDA tensors raise. c10d's
// operators stay: they call the process group, which is emulated.
void register_fallback(const char* const* cuda_ops, int count);

}  // namespace prismscale
