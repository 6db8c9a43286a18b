// Functions that the extension's parts offer each other.
#pragma once

#include <ATen/core/Generator.h>

#include "storage.h"

namespace prismscale {

void install_guard();
void install_hooks();
// Sets the version of cuDNN that the device reports: 9.15.1 is 91501.
void set_cudnn(int64_t version);
void register_ddp_timer();
void register_profiler();
const at::Generator& default_generator(int device_index);

}  // namespace prismscale
