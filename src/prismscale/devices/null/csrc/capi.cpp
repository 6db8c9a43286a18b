// The C interface that Python loads with ctypes (bindings.py).
#include "capi.h"

#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "cuda_ops.h"  // generated at build time from torch's operator list
#include "fallback.h"
#include "graph_capture.h"
#include "policy.h"
#include "recorder.h"
#include "registration.h"
#include "runtime.h"
#include "shared_pages.h"

namespace prismscale {

namespace {

DeviceSettings to_settings(const SettingsRow& row) {
  DeviceSettings settings;
  AllocatorConfig& config = settings.allocator;
  config.total_bytes = static_cast<size_t>(row.total_bytes);
  config.outside_bytes = static_cast<size_t>(row.outside_bytes);
  if (row.max_split_bytes > 0) config.max_split_bytes = static_cast<size_t>(row.max_split_bytes);
  config.max_non_split_rounding_bytes = static_cast<size_t>(row.max_non_split_rounding_bytes);
  config.large_segment_bytes = static_cast<size_t>(row.large_segment_bytes);
  config.expandable_segments = row.expandable_segments != 0;
  config.graph_capture_record_stream_reuse = row.graph_capture_record_stream_reuse != 0;
  config.garbage_collection_threshold = row.garbage_collection_threshold;
  config.memory_fraction = row.memory_fraction;
  for (const int64_t divisions : row.roundup_power2_divisions) {
    if (divisions > 0) config.roundup_power2_divisions.push_back(static_cast<size_t>(divisions));
  }
  settings.blas_workspace_bytes = static_cast<size_t>(row.blas_workspace_bytes);
  settings.multiprocessors = row.multiprocessors;
  return settings;
}

struct ManualProgress final : StreamProgress {
  uint64_t ticket(int64_t) override { return issued; }
  bool passed(int64_t, uint64_t ticket) override { return ticket < completed; }
  CapturePoint captured(int64_t stream) override { return points[stream]; }
  // Counts a kernel in the graph under capture.
  void work(int64_t stream) {
    CapturePoint& point = points[stream];
    const auto index = static_cast<size_t>(stream);
    point.resize(std::max(point.size(), index + 1));
    point[index] += 1;
  }
  // From now on the work of `stream` comes after what `other` has done so far.
  void wait(int64_t stream, int64_t other) { move_behind(points[stream], points[other]); }
  uint64_t issued = 0, completed = 0;
  std::map<int64_t, CapturePoint> points;
};

// An allocator by itself, for replaying alloc/free events without tensors.
struct Replay {
  ManualProgress progress;
  CachingAllocator allocator;
  explicit Replay(const SettingsRow& row)
      : allocator(to_settings(row).allocator, uint64_t{1} << 45, &progress) {}
};

int64_t copy_blocks(const std::vector<BlockRow>& rows, BlockRow* out, int64_t capacity) {
  std::copy_n(rows.begin(), std::min(capacity, static_cast<int64_t>(rows.size())), out);
  return static_cast<int64_t>(rows.size());
}

void copy_stats(const AllocatorStats& stats, int64_t* out) {
  std::memcpy(out, &stats, sizeof stats);
}

// On a CUDA build each of our kernels replaces one of torch's, and torch warns about it.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

at::Tensor known_or_undefined(const at::Tensor& tensor) {
  const auto known = known_value(tensor);
  return known ? known->clone() : at::Tensor();
}

bool is_known(const at::Tensor& tensor) { return known_value(tensor).has_value(); }
bool set_value(const at::Tensor& tensor, const at::Tensor& value) {
  return set_known(tensor, value);
}
void forget_value(const at::Tensor& tensor) {
  forget(tensor);
  written_in_graph(tensor);
}
bool lasts(const at::Tensor& tensor) { return lasts_in_graph(tensor); }
at::Tensor ghost(const at::Tensor& tensor) { return is_null(tensor) ? make_ghost(tensor) : tensor; }
void raise_error(int64_t error) { raise_cuda(static_cast<CudaError>(error)); }
void synchronize(int64_t index) { device(static_cast<int>(index)).synchronize_device(); }
std::optional<at::Generator> generator_of(int64_t index) {
  return default_generator(static_cast<int>(index));
}

}  // namespace

TORCH_LIBRARY(prismscale_null, library) {
  library.def("known(Tensor tensor) -> Tensor", &known_or_undefined);
  library.def("is_known(Tensor tensor) -> bool", &is_known);
  library.def("set_known(Tensor tensor, Tensor value) -> bool", &set_value);
  library.def("default_generator(int device) -> Generator?", &generator_of);
  library.def("forget(Tensor tensor) -> ()", &forget_value);
  library.def("lasts_in_graph(Tensor tensor) -> bool", &lasts);
  library.def("set_share(Tensor map, float share) -> ()", &set_share);
  library.def("ghost(Tensor tensor) -> Tensor", &ghost);
  library.def("synchronize(int device) -> ()", &synchronize);
  library.def("raise_cuda(int error) -> ()", &raise_error);
}

extern "C" {
#pragma GCC visibility push(default)

int64_t ps_stats_words() { return sizeof(AllocatorStats) / sizeof(int64_t); }

// Once per process, before any CUDA tensor exists.
void ps_install(const SettingsRow* row) {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  map_large_blocks();
  configure_devices(static_cast<int>(row->devices), to_settings(*row));
  register_cuda_allocator();
  install_guard();
  install_hooks();
  register_ddp_timer();
  register_profiler();
  register_direct_kernels();
  register_policy_kernels();
  register_attention_choice();
  register_fallback(kCudaOps, kCudaOpCount);
}

void ps_set_capability(int major, int minor) { set_capability(major, minor); }
void ps_set_cudnn(int64_t version) { set_cudnn(version); }

void ps_set_cost(CostCallback callback, int64_t device_ns, int64_t host_ns) {
  set_cost_callback(callback, device_ns, host_ns);
  set_timed(callback != nullptr);
}

int ps_current_device() { return current_device(); }
void ps_set_device(int index) { set_current_device(index); }
int64_t ps_current_stream(int index) { return current_stream(index); }
void ps_set_stream(int index, int64_t stream) { set_current_stream(index, stream); }
int64_t ps_host_time_ns() { return host_time_ns(); }
void ps_advance_host(int64_t by_ns) { advance_host(by_ns); }
// Issuing a communication takes the host as long as an operator. What it takes of the links is no
// work of the device.
void ps_communicates(int index, int64_t stream) {
  static const uint32_t id = register_signature("c10d::call\x1f\x1f\x1f");
  CallCost cost = cost_of(signature_text(id));
  cost.device_ns = cost.busy_ns = 0;
  device(index).launch(stream, id, cost);
}
void ps_host_waits_until(int64_t time_ns) { host_waits_until(time_ns); }
int64_t ps_stream_time_ns(int index, int64_t stream) {
  return device(index).stream_time_ns(stream);
}
int64_t ps_elapsed_ns(const void* start, const void* end) {
  return static_cast<const EventState*>(end)->time_ns -
      static_cast<const EventState*>(start)->time_ns;
}
void ps_advance_stream(int index, int64_t stream, int64_t until_ns) {
  device(index).advance_stream(stream, until_ns);
}
int64_t ps_launch(int index, int64_t stream, uint32_t signature, int64_t device_ns,
                  int64_t host_ns, int64_t busy_ns) {
  return device(index).launch(stream, signature, {device_ns, host_ns, busy_ns});
}

void ps_memory_stats(int index, int64_t* out) {
  device(index).with_allocator([&](CachingAllocator& a) { copy_stats(a.stats(), out); });
}
void ps_take_peaks(int index, int64_t* allocated, int64_t* reserved) {
  const auto peaks = device(index).take_peaks();
  *allocated = peaks[0];
  *reserved = peaks[1];
}
void ps_reset_peaks(int index) {
  device(index).with_allocator([](CachingAllocator& a) { a.reset_peaks(); });
}
void ps_reset_accumulated(int index) {
  device(index).with_allocator([](CachingAllocator& a) { a.reset_accumulated(); });
}
void ps_empty_cache(int index, uint64_t kind, uint64_t number) {
  device(index).empty_cache({kind, number});
}
void ps_clear_blas() {
  for (int index = 0; index < device_count(); ++index) device(index).clear_blas();
}
// Private pools. They return 0 where torch would raise: the pool is not in a state that allows
// this.
int ps_pool_retain(int index, uint64_t kind, uint64_t number) {
  return device(index).with_allocator(
      [&](CachingAllocator& a) { return a.retain_pool({kind, number}); });
}
int ps_pool_begin_capture(int index, uint64_t kind, uint64_t number) {
  return device(index).begin_pool_of_capture({kind, number});
}
// Routes to the pool what this thread (`this_thread` -1: any) allocates on `stream` (-1: any).
int ps_pool_begin(int index, uint64_t kind, uint64_t number, int this_thread, int64_t stream) {
  const auto thread = std::this_thread::get_id();
  const auto takes = [=](int64_t s) {
    return (this_thread < 0 || thread == std::this_thread::get_id()) && (stream < 0 || s == stream);
  };
  return device(index).with_allocator(
      [&](CachingAllocator& a) { return a.begin_pool({kind, number}, takes); });
}
int ps_pool_end(int index, uint64_t kind, uint64_t number) {
  return device(index).with_allocator(
      [&](CachingAllocator& a) { return a.end_pool({kind, number}); });
}
int ps_pool_release(int index, uint64_t kind, uint64_t number) {
  return device(index).with_allocator(
      [&](CachingAllocator& a) { return a.release_pool({kind, number}); });
}
int ps_pool_use_count(int index, uint64_t kind, uint64_t number) {
  return device(index).with_allocator(
      [&](CachingAllocator& a) { return a.pool_use_count({kind, number}); });
}
// Writes each pool's id and reserved bytes, as in AllocatorStats. Returns the number of pools.
int64_t ps_pool_stats(int index, int64_t* out, int64_t capacity) {
  const auto stats = device(index).with_allocator(
      [](CachingAllocator& a) { return a.reserved_by_pool(); });
  for (const auto& [id, reserved] : stats) {
    if (capacity-- <= 0) break;
    *out++ = static_cast<int64_t>(id.first);
    *out++ = static_cast<int64_t>(id.second);
    std::memcpy(out, &reserved, sizeof reserved);
    out += sizeof reserved / sizeof(int64_t);
  }
  return static_cast<int64_t>(stats.size());
}
void ps_pool_options(int index, uint64_t kind, uint64_t number, int use_on_oom, int no_split) {
  device(index).with_allocator([&](CachingAllocator& a) {
    a.set_pool_options({kind, number}, use_on_oom != 0, no_split != 0);
  });
}
int64_t ps_free_bytes(int index) {
  return device(index).with_allocator(
      [](CachingAllocator& a) { return static_cast<int64_t>(a.device_free_bytes()); });
}
void ps_set_memory_fraction(int index, double fraction) {
  device(index).with_allocator([&](CachingAllocator& a) { a.config().memory_fraction = fraction; });
}
// Sets what others hold of the device's memory: the CUDA context, NCCL buffers.
void ps_set_outside_bytes(int index, int64_t bytes) {
  device(index).with_allocator(
      [&](CachingAllocator& a) { a.config().outside_bytes = static_cast<size_t>(bytes); });
}
// Applies the settings from the program's environment when CUDA starts, and later changes.
void ps_configure(const SettingsRow* row) {
  const DeviceSettings settings = to_settings(*row);
  for (int index = 0; index < device_count(); ++index) device(index).configure(settings);
}
int64_t ps_blocks(int index, BlockRow* out, int64_t capacity) {
  return copy_blocks(device(index).blocks(), out, capacity);
}
void ps_note_out_of_memory(int index) { device(index).note_out_of_memory(); }
int64_t ps_oom_blocks(int index, BlockRow* out, int64_t capacity) {
  return copy_blocks(device(index).blocks_at_out_of_memory(), out, capacity);
}

void* ps_raw_alloc(int index, int64_t bytes, int64_t stream) {
  return device(index).malloc(static_cast<size_t>(bytes), stream);
}
void ps_raw_free(int index, void* block) { device(index).free(static_cast<Block*>(block)); }

void ps_resize_storage(void* storage, int64_t bytes) {
  static const uint32_t id = register_signature("UntypedStorage.resize_");
  set_current_op(id);
  resize_storage(static_cast<c10::StorageImpl*>(storage), static_cast<size_t>(bytes));
}

// ---- replay ----

void* ps_replay_new(const SettingsRow* row) { return new Replay(*row); }
void ps_replay_delete(void* replay) { delete static_cast<Replay*>(replay); }
void* ps_replay_malloc(void* replay, int64_t bytes, int64_t stream) {
  return static_cast<Replay*>(replay)->allocator.malloc(static_cast<size_t>(bytes), stream);
}
uint64_t ps_replay_address(void* block) { return static_cast<Block*>(block)->address; }
void ps_replay_free(void* replay, void* block) {
  auto& self = *static_cast<Replay*>(replay);
  self.allocator.free(static_cast<Block*>(block));
}
void ps_replay_record_stream(void* replay, void* block, int64_t stream) {
  static_cast<Replay*>(replay)->allocator.record_stream(static_cast<Block*>(block), stream);
}
// Marks everything enqueued so far, on all streams, as done.
void ps_replay_synchronize(void* replay) {
  auto& progress = static_cast<Replay*>(replay)->progress;
  progress.issued += 1;
  progress.completed = progress.issued;
}
void ps_replay_empty_cache(void* replay, uint64_t pool) {
  static_cast<Replay*>(replay)->allocator.empty_cache({pool, 0});
}
// Takes the allocations on `stream` from the pool, as in a capture.
int ps_replay_begin_pool(void* replay, uint64_t pool, int64_t stream) {
  auto& allocator = static_cast<Replay*>(replay)->allocator;
  if (!allocator.begin_pool({pool, 0}, [=](int64_t s) { return s == stream; })) return 0;
  allocator.capture_begins();
  return 1;
}
int ps_replay_end_pool(void* replay, uint64_t pool) {
  auto& allocator = static_cast<Replay*>(replay)->allocator;
  if (!allocator.end_pool({pool, 0})) return 0;
  allocator.capture_ends();
  return 1;
}
void ps_replay_captured_work(void* replay, int64_t stream) {
  static_cast<Replay*>(replay)->progress.work(stream);
}
void ps_replay_captured_wait(void* replay, int64_t stream, int64_t other) {
  static_cast<Replay*>(replay)->progress.wait(stream, other);
}
int ps_replay_release_pool(void* replay, uint64_t pool) {
  return static_cast<Replay*>(replay)->allocator.release_pool({pool, 0});
}
void ps_replay_stats(void* replay, int64_t* out) {
  copy_stats(static_cast<Replay*>(replay)->allocator.stats(), out);
}

#pragma GCC visibility pop
}  // extern "C"

}  // namespace prismscale
