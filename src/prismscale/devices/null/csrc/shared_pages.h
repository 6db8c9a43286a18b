// Large host tensors of one value, which share their pages.
#pragma once

#include <ATen/core/Tensor.h>

namespace prismscale {

// Sets every element of `tensor` to `value`. The pages of a large tensor are those of a small file
// until the program writes to them. Programs only read, if at all, what they copy from a device
// without values, and an offloaded model would otherwise fill this machine's memory with ones.
void fill_host(const at::Tensor& tensor, double value);

// From now on malloc gives every large block pages of its own. Called once per process.
void map_large_blocks();

}  // namespace prismscale
