// Streams, logical time and memory of the null devices; see device.h.
#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>

#include "graph_capture.h"

namespace prismscale {
namespace {

// No process maps these addresses: a stray read faults instead of returning something.
constexpr uint64_t kFirstAddress = uint64_t{1} << 45;
constexpr uint64_t kAddressesPerDevice = uint64_t{1} << 44;

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* all = new std::vector<std::unique_ptr<Device>>();  // outlives every tensor
  return *all;
}

std::atomic<int64_t> g_host_ns{0};
std::atomic<bool> g_timed{false};
thread_local int t_device = 0;
thread_local std::array<int64_t, kMaxDevices> t_streams{};
thread_local uint32_t t_op = 0;

// cuBLAS keeps one handle per thread and one workspace per handle and stream; handles of ended
// threads are reused.
class BlasHandle {
 public:
  BlasHandle() {
    std::lock_guard<std::mutex> lock(mutex());
    auto& free = free_handles();
    if (free.empty()) {
      id_ = next_++;
    } else {
      id_ = *free.begin();
      free.erase(free.begin());
    }
  }
  ~BlasHandle() {
    std::lock_guard<std::mutex> lock(mutex());
    free_handles().insert(id_);
  }
  int id() const { return id_; }

 private:
  static std::mutex& mutex() {
    static auto* m = new std::mutex();
    return *m;
  }
  static std::set<int>& free_handles() {
    static auto* s = new std::set<int>();
    return *s;
  }
  static inline int next_ = 0;
  int id_ = 0;
};

std::string format_bytes(size_t bytes) {
  char text[64];
  const auto value = static_cast<double>(bytes);
  if (bytes <= 1024) {
    std::snprintf(text, sizeof text, "%zu bytes", bytes);
  } else if (bytes <= kMiB) {
    std::snprintf(text, sizeof text, "%.2f KiB", value / 1024);
  } else if (bytes <= (kMiB << 10)) {
    std::snprintf(text, sizeof text, "%.2f MiB", value / static_cast<double>(kMiB));
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", value / static_cast<double>(kMiB << 10));
  }
  return text;
}

std::vector<BlockRow> rows_of(const CachingAllocator& allocator) {
  std::vector<BlockRow> rows;
  for (const Block* block : allocator.blocks()) {
    const PrivatePool* owner = block->pool->owner;
    const PoolId id = owner == nullptr ? PoolId{0, 0} : owner->id;
    rows.push_back({block->address, static_cast<int64_t>(block->size),
                    static_cast<int64_t>(block->requested), block->stream, block->made_by,
                    block->allocated, block->mapped, block->pool->is_small,
                    block->prev == nullptr || !block->prev->mapped,
                    {id.first, id.second}});
  }
  return rows;
}

void raise_to(std::vector<uint64_t>& horizon, const std::vector<uint64_t>& other) {
  for (size_t i = 0; i < horizon.size(); ++i) horizon[i] = std::max(horizon[i], other[i]);
}

}  // namespace

int device_count() { return static_cast<int>(devices().size()); }

Device& device(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "CUDA error: invalid device ordinal ", index,
              "; the null node has ", device_count(), " devices");
  return *devices()[static_cast<size_t>(index)];
}

void configure_devices(int count, const DeviceSettings& settings) {
  devices().clear();
  for (int i = 0; i < count; ++i) devices().push_back(std::make_unique<Device>(i, settings));
}

int current_device() { return t_device; }
void set_current_device(int index) { t_device = index; }
int64_t current_stream(int index) { return t_streams[static_cast<size_t>(index)]; }
void set_current_stream(int index, int64_t stream) {
  t_streams[static_cast<size_t>(index)] = stream;
}
int64_t host_time_ns() { return g_host_ns.load(std::memory_order_relaxed); }
void add_host_time(int64_t by_ns) { g_host_ns.fetch_add(by_ns, std::memory_order_relaxed); }
void advance_host(int64_t by_ns) {
  add_host_time(by_ns);
  SpanGraph::get().host_worked(by_ns);
}
void host_waits_until(int64_t time_ns) {
  int64_t now = g_host_ns.load();
  while (now < time_ns && !g_host_ns.compare_exchange_weak(now, time_ns)) {
  }
}
void set_timed(bool timed) { g_timed = timed; }
void set_current_op(uint32_t signature) { t_op = signature; }
uint32_t current_op() { return t_op; }

Device::Device(int index, const DeviceSettings& settings)
    : index_(index),
      streams_(kStreams),
      busy_(kStreams),
      completed_(kStreams, 0),
      allocator_(std::make_unique<CachingAllocator>(
          settings.allocator, kFirstAddress + static_cast<uint64_t>(index) * kAddressesPerDevice,
          this)),
      blas_workspace_bytes_(settings.blas_workspace_bytes),
      multiprocessors_(settings.multiprocessors) {
  for (auto& stream : streams_) stream.horizon.resize(kStreams, 0);
}

void Device::configure(const DeviceSettings& settings) {
  with_allocator([&](CachingAllocator& allocator) {
    AllocatorConfig config = settings.allocator;
    config.outside_bytes = allocator.config().outside_bytes;  // what others hold by now
    // A fraction that the program has set by a call outlives settings without one.
    if (config.memory_fraction == 0.0) config.memory_fraction = allocator.config().memory_fraction;
    allocator.config() = config;
    blas_workspace_bytes_ = settings.blas_workspace_bytes;
  });
}

int64_t Device::new_stream(bool high_priority) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int slot = next_stream_[high_priority]++ % kStreamsPerPool;
  return 1 + (high_priority ? kStreamsPerPool : 0) + slot;
}

int64_t Device::launch(int64_t stream, uint32_t signature, const CallCost& cost) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  state.issued += 1;
  if (is_without_cost()) return state.tail_ns;
  if (state.branch >= 0) {
    if (graph_->is_broken) raise_cuda(kCaptureInvalidated);
    advance_host(cost.host_ns);  // Python and the dispatcher take their time in a capture, too
    graph_->launched(state.branch, signature, cost);
    return kCaptured;
  }
  const bool is_queued = cost.device_ns > 0;  // a view launches nothing
  if (is_queued) wait_for_room(state);
  add_host_time(cost.host_ns);
  const int64_t start = run(stream, signature, cost, is_queued ? kQueued : kNotQueued);
  if (is_queued) state.queue_ns.push_back(state.tail_ns);
  return start;
}

// Kernels of other streams that were launched later may have delayed this stream's last work. That
// is not new work, so it counts even while is_without_cost().
void Device::reckon(int64_t stream) {
  StreamState& state = streams_[static_cast<size_t>(stream)];
  const int64_t free = std::max(state.tail_ns, host_time_ns()), end = busy_.end_ns(stream);
  if (end <= free) return;
  SpanGraph::get().moved(index_, stream, end - free);
  state.tail_ns = end;
}

void Device::settle(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  reckon(stream);
}

// Returns the start time.
int64_t Device::run(
    int64_t stream, uint32_t signature, const CallCost& cost, Queueing queueing) {
  reckon(stream);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  const int64_t now = host_time_ns(), free = std::max(state.tail_ns, now);
  const int64_t waited = busy_.place(stream, free, cost, now);
  SpanGraph::get().launched(
      index_, stream, signature, cost.host_ns, cost.device_ns, waited, queueing);
  state.tail_ns = free + waited + cost.device_ns;
  kernels_ns_ += cost.device_ns;
  return free + waited;
}

void Device::wait_for_room(StreamState& state) {
  const auto depth = static_cast<size_t>(launch_queue_depth());
  while (state.queue_ns.size() >= depth) {
    host_waits_until(state.queue_ns.front());
    state.queue_ns.pop_front();
  }
}

void Device::record(EventState& event, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  event.graph = state.branch >= 0 ? graph_ : nullptr;
  if (event.graph) return graph_->recorded(state.branch, event);
  reckon(stream);
  // An event on an idle stream happens when the host gets there, as on a real device.
  event.time_ns = std::max(state.tail_ns, host_time_ns());
  event.horizon = state.horizon;
  event.horizon[static_cast<size_t>(stream)] = state.issued;
  event.frontier = SpanGraph::get().recorded(index_, stream);
}

void Device::wait(const EventState& event, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  if (event.graph || state.branch >= 0) return wait_in_graph(event, state);
  reckon(stream);
  state.tail_ns = std::max(state.tail_ns, event.time_ns);
  raise_to(state.horizon, event.horizon);
  SpanGraph::get().waits(index_, stream, event.frontier);
}

// A query does not wait for the event. But a loop that polls must end, so a query before the event
// is reached costs 1 µs of host time.
bool Device::query(const EventState& event) {
  check_capture_allows();
  if (event.graph) raise_cuda(kCapturedEvent);
  if (event.time_ns <= host_time_ns()) return true;
  advance_host(1000);
  return event.time_ns <= host_time_ns();
}

bool Device::query_stream(int64_t stream) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check_synchronizes(streams_[static_cast<size_t>(stream)]);
  }
  EventState now;
  now.time_ns = stream_time_ns(stream);
  return query(now);
}

void Device::complete(const std::vector<uint64_t>& horizon, int64_t time_ns) {
  host_waits_until(time_ns);
  if (!horizon.empty()) raise_to(completed_, horizon);
}

void Device::synchronize(const EventState& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_without_cost()) return;
  check_capture_allows();
  if (event.graph) raise_cuda(kCapturedEvent);
  complete(event.horizon, event.time_ns);
  SpanGraph::get().host_waits(event.frontier);
}

void Device::synchronize_stream(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_without_cost()) return;
  StreamState& state = streams_[static_cast<size_t>(stream)];
  check_synchronizes(state);
  reckon(stream);
  SpanGraph::get().host_waits(index_, stream);
  state.horizon[static_cast<size_t>(stream)] = state.issued;
  complete(state.horizon, state.tail_ns);
}

void Device::check_synchronizes(const StreamState& state) {
  if (state.branch < 0) return;
  graph_->is_broken = true;
  raise_cuda(kCaptureUnsupported);
}

void Device::synchronize_device() {
  if (!is_without_cost()) {
    // Checked before any stream waits: the capturing one may be the last.
    std::lock_guard<std::mutex> lock(mutex_);
    for (const StreamState& state : streams_) check_synchronizes(state);
  }
  for (int64_t stream = 0; stream < kStreams; ++stream) synchronize_stream(stream);
}

int64_t Device::stream_time_ns(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  reckon(stream);
  return streams_[static_cast<size_t>(stream)].tail_ns;
}

int64_t Device::kernels_ns() {
  std::lock_guard<std::mutex> lock(mutex_);
  return kernels_ns_;
}

void Device::advance_stream(int64_t stream, int64_t until_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  state.tail_ns = std::max(state.tail_ns, until_ns);
  state.issued += 1;
}

uint64_t Device::ticket(int64_t stream) {
  const StreamState& state = streams_[static_cast<size_t>(stream)];
  return g_timed ? static_cast<uint64_t>(state.tail_ns) : state.issued;
}

bool Device::passed(int64_t stream, uint64_t ticket) {
  if (g_timed) return static_cast<int64_t>(ticket) <= host_time_ns();
  return completed_[static_cast<size_t>(stream)] >= ticket;
}

std::array<int64_t, 2> Device::take_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  const AllocatorStats& stats = allocator_->stats();
  const std::array<int64_t, 2> now = {stats.allocated_bytes[kAllPools].current,
                                      stats.reserved_bytes[kAllPools].current};
  const std::array<int64_t, 2> seen = {std::max(peaks_[0], now[0]), std::max(peaks_[1], now[1])};
  peaks_ = now;
  return seen;
}

Block* Device::malloc(size_t bytes, int64_t stream) {
  // The origin is asked for before the lock is taken: the callback may wait for Python.
  return allocate(bytes, stream, history_.is_on() ? origin_of(static_cast<int64_t>(bytes)) : 0);
}

void Device::record_memory(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocator_->observed_by(on ? &history_ : nullptr);
  on ? history_.start() : history_.stop();
}

int64_t Device::take_memory_rows(MemoryRow* out, int64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<MemoryRow>& rows = history_.rows();
  const auto count = static_cast<int64_t>(rows.size());
  if (capacity < count) return count;
  std::copy(rows.begin(), rows.end(), out);
  rows.clear();
  return count;
}

Block* Device::allocate(size_t bytes, int64_t stream, int32_t origin) {
  Block* block = nullptr;
  bool gave_back = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    history_.allocates(current_op(), origin);
    const AllocatorStats& stats = allocator_->stats();
    const int64_t freed = stats.num_device_free;
    block = allocator_->malloc(bytes, stream);
    gave_back = stats.num_device_free > freed;
    if (block != nullptr) {
      block->made_by = current_op();
      peaks_[0] = std::max(peaks_[0], stats.allocated_bytes[kAllPools].current);
      peaks_[1] = std::max(peaks_[1], stats.reserved_bytes[kAllPools].current);
    }
  }
  if (gave_back) wait_to_give_back();
  if (block == nullptr) raise_out_of_memory(bytes);
  return block;
}

void Device::empty_cache(PoolId id) {
  const bool gave_back = with_allocator([&](CachingAllocator& allocator) {
    const int64_t freed = allocator.stats().num_device_free;
    allocator.empty_cache(id);
    return allocator.stats().num_device_free > freed;
  });
  if (gave_back) wait_to_give_back();
}

// CUDA frees and unmaps memory when all work that was launched before is done.
void Device::wait_to_give_back() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (graph_ != nullptr) return;  // what a capture frees was of pools that nothing uses any more
  }
  synchronize_device();
}

std::vector<BlockRow> Device::blocks() {
  std::lock_guard<std::mutex> lock(mutex_);
  return rows_of(*allocator_);
}

void Device::free(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocator_->free(block);
}

void Device::record_stream(Block* block, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocator_->record_stream(block, stream);
}

void Device::use_blas(int64_t stream) {
  if (blas_workspace_bytes_ == 0) return;
  thread_local BlasHandle handle;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto id = static_cast<size_t>(handle.id());
    if (id >= blas_workspaces_.size()) blas_workspaces_.resize(id + 1);
    auto has = blas_workspaces_[id][static_cast<size_t>(stream)];
    if (has) return;
    has = true;
  }
  Block* block = allocate(blas_workspace_bytes_, stream, kWorkspace);
  std::lock_guard<std::mutex> lock(mutex_);
  blas_blocks_.push_back(block);
}

void Device::clear_blas() {
  std::lock_guard<std::mutex> lock(mutex_);
  blas_workspaces_.clear();
  for (Block* block : blas_blocks_) allocator_->free(block);
  blas_blocks_.clear();
}

void Device::note_out_of_memory() {
  std::lock_guard<std::mutex> lock(mutex_);
  oom_blocks_ = rows_of(*allocator_);
}

// The text is that of torch on CUDA, word for word where programs look at it: handlers match on
// "CUDA out of memory", and readers know the wording.
void Device::raise_out_of_memory(size_t bytes) {
  note_out_of_memory();
  std::string message;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const AllocatorConfig& config = allocator_->config();
    const auto allocated =
        static_cast<size_t>(allocator_->stats().allocated_bytes[kAllPools].current);
    const auto reserved =
        static_cast<size_t>(allocator_->stats().reserved_bytes[kAllPools].current);
    const size_t in_pools = allocator_->private_bytes();
    const std::string in_private_pools = in_pools == 0
        ? ""
        : "with " + format_bytes(in_pools) + " allocated in private pools (e.g., CUDA Graphs), ";
    message = "CUDA out of memory. Tried to allocate " +
        format_bytes(allocator_->segment_bytes_for(bytes)) + ". GPU " + std::to_string(index_) +
        " has a total capacity of " + format_bytes(config.total_bytes) + " of which " +
        format_bytes(allocator_->device_free_bytes()) + " is free. Including non-PyTorch memory, " +
        "this process has " + format_bytes(reserved + config.outside_bytes) + " memory in use. ";
    if (config.memory_fraction > 0.0) {
      const double allowed = config.memory_fraction * static_cast<double>(config.total_bytes);
      message += format_bytes(static_cast<size_t>(allowed)) + " allowed; ";
    }
    message += "Of the allocated memory " + format_bytes(allocated) +
        " is allocated by PyTorch, " + in_private_pools + "and " +
        format_bytes(reserved - allocated) +
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try" +
        " setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation. (null CUDA" +
        " device of prismscale: this memory is modelled)";
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, message);
}

}  // namespace prismscale
