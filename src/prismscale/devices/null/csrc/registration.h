// Registers kernels of the null device with the dispatcher. There is no other way to do so.
#pragma once

#include <torch/library.h>

namespace prismscale {

void implement_kernel(const char* name, torch::CppFunction&& kernel);

// Registers a CUDA kernel for the aten operator `name` ("add.Tensor"). In a CUDA build it replaces
// torch's own. Only the first kernel registered for a name counts.
template <typename Kernel>
void implement(const char* name, Kernel&& kernel) {
  implement_kernel(name, torch::CppFunction(std::forward<Kernel>(kernel)));
}

// [Note: no kernel of a GPU is reached] Every operator that has a CUDA kernel in this build gets
// the boxed kernel instead, whatever its namespace. So do the operators in `cuda_ops`, whose CUDA
// kernels a CPU build lacks. All others reach it as the fallback. Operators on sparse, quantized
// and nested CUDA tensors raise. c10d's operators stay: they call the process group, which is
// emulated.
void register_fallback(const char* const* cuda_ops, int count);

}  // namespace prismscale
