// The record of executed ops. No torch headers: they are most of a file's compile time.
#pragma once

#include <cstdint>
#include <string>

namespace prismscale {

uint32_t register_signature(std::string description);
std::string signature_text(uint32_t id);

// Who launches an op: a CUDA graph's launches cost the host nothing.
enum class LaunchedBy { kHost, kGraph };

void record_op(uint32_t signature, int device, int64_t stream, int64_t start_ns, int64_t device_ns,
               LaunchedBy by = LaunchedBy::kHost);

}  // namespace prismscale
