// What the extension's parts offer each other.
#pragma once

#include <ATen/core/Generator.h>

#include "storage.h"

namespace prismscale {

void install_guard();
void install_hooks();
void register_ddp_timer();
const at::Generator& default_generator(int device_index);

}  // namespace prismscale
