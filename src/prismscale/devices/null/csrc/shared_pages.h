// Large host tensors of one value, which take no memory of their own.
#pragma once

#include <ATen/core/Tensor.h>

namespace prismscale {

// Every element of `tensor` becomes `value`. Pages of a large one are those of a small file until the
// program writes to them: what is copied from a device that holds no values is only read, if at all,
// and an offloaded model would otherwise fill this machine's memory with ones.
void fill_host(const at::Tensor& tensor, double value);

// From now on such tensors have pages of their own. Once per process.
void map_large_blocks();

}  // namespace prismscale
