// See memory_history.h.
#include "memory_history.h"

#include "device.h"
#include "spans.h"

namespace prismscale {

namespace {

OriginCallback g_origin = nullptr;
int64_t g_least_bytes = 0;

}  // namespace

void MemoryHistory::happened(
    MemoryAction action, uint64_t address, size_t bytes, size_t block_bytes, int64_t stream) {
  if (!on_) return;
  const bool allocates = action == MemoryAction::kAlloc;
  rows_.push_back({address, static_cast<int64_t>(bytes), static_cast<int64_t>(block_bytes),
                   host_time_ns(), allocates ? made_by_ : 0,
                   allocates ? origin_ : 0, SpanGraph::get().label(), static_cast<int16_t>(stream),
                   static_cast<int16_t>(action)});
}

void set_origin_callback(OriginCallback callback, int64_t least_bytes) {
  g_origin = callback;
  g_least_bytes = least_bytes;
}

int32_t origin_of(int64_t bytes) {
  return g_origin == nullptr || bytes < g_least_bytes ? 0 : g_origin(bytes);
}

extern "C" {
#pragma GCC visibility push(default)

void ps_set_origin(OriginCallback callback, int64_t least_bytes) {
  set_origin_callback(callback, least_bytes);
}
void ps_record_memory(int index, int on) { device(index).record_memory(on != 0); }
int64_t ps_memory_rows(int index, MemoryRow* out, int64_t capacity) {
  return device(index).take_memory_rows(out, capacity);
}

#pragma GCC visibility pop
}  // extern "C"

}  // namespace prismscale
