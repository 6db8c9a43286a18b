// The devices that are not there: streams with logical time, and one caching allocator each.
//
// Logical time: an op costs the host `host_ns`, then runs on its stream for `device_ns`, starting
// when both the host has issued it and the stream is free. Events and waits carry these times. A
// stream takes a number of launches, the depth of its queue; the next one holds the host until the
// oldest of them is done.
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "caching_allocator.h"
#include "capi.h"
#include "memory_history.h"
#include "sharing.h"
#include "spans.h"

namespace prismscale {

constexpr int kMaxDevices = 16;
constexpr int kStreamsPerPool = 32;  // torch.cuda.Stream() hands out 32 streams round-robin
constexpr int kGraphBranches = 16;  // parallel branches of a replayed graph that are kept apart
constexpr int64_t kFirstBranchStream = 1 + 2 * kStreamsPerPool;  // all but the first have their own
constexpr int kStreams = static_cast<int>(kFirstBranchStream) + kGraphBranches - 1;
constexpr int64_t kCaptured = -1;  // start of a launch that was not made, but recorded

class RecordedGraph;  // graph_capture.h
enum class CallKind : int;

struct DeviceSettings {
  AllocatorConfig allocator;
  size_t blas_workspace_bytes = 0;
  int64_t multiprocessors = 1;
};

struct EventState {
  int64_t time_ns = 0;
  std::vector<uint64_t> horizon;  // per stream: how many of its ops come before the event
  Frontier frontier;              // the same in nodes of the condensed graph
  std::shared_ptr<RecordedGraph> graph;  // that it was recorded in: then it is only ...
  uint32_t place = 0;                    // ... one of the graph's events
};

class Device : public StreamProgress {
 public:
  Device(int index, const DeviceSettings& settings);

  // Settings of a program that has no tensor yet, or changes them between allocations.
  void configure(const DeviceSettings& settings);

  // Streams and logical time.
  int64_t new_stream(bool high_priority);
  // Returns the start time, or kCaptured.
  int64_t launch(int64_t stream, uint32_t signature, const CallCost& cost);
  void record(EventState& event, int64_t stream);
  void wait(const EventState& event, int64_t stream);
  bool query(const EventState& event);
  bool query_stream(int64_t stream);
  void synchronize(const EventState& event);
  void synchronize_stream(int64_t stream);
  void synchronize_device();
  int64_t stream_time_ns(int64_t stream);
  void settle(int64_t stream);  // reckon with what other streams' kernels have moved
  int64_t kernels_ns();  // what all kernels have taken that were launched here

  // Captures of graphs. Launches on streams that take part, and events between them, are recorded.
  void begin_capture(std::shared_ptr<RecordedGraph> graph, int64_t stream);
  void end_capture();
  bool is_capturing(int64_t stream);
  bool called(int64_t stream, uint32_t call, CallKind kind, uint32_t joins);
  // Replays: the host launches the graph, its launches follow at once, and it takes one place in the
  // stream's queue until all of them are done.
  int64_t launch_graph(int64_t stream, uint32_t signature, int64_t host_ns);
  int64_t launch_in_graph(int64_t stream, uint32_t signature, const CallCost& cost);
  void graph_launched(int64_t stream);
  bool begin_pool_of_capture(PoolId id);  // whatever thread allocates on its streams
  void advance_stream(int64_t stream, int64_t until_ns);

  // Memory. `malloc` raises torch's OutOfMemoryError.
  Block* malloc(size_t bytes, int64_t stream);
  void free(Block* block);
  void record_stream(Block* block, int64_t stream);
  void use_blas(int64_t stream);
  int64_t multiprocessors() const { return multiprocessors_; }
  void clear_blas();
  // Most bytes {allocated, reserved} since the last call: peaks that no program resets.
  std::array<int64_t, 2> take_peaks();
  std::vector<BlockRow> blocks();
  void record_memory(bool on);
  // Oldest first; with room for all of them they are forgotten. Returns how many there are.
  int64_t take_memory_rows(MemoryRow* out, int64_t capacity);
  // Memory ran out, here or beside this allocator.
  void note_out_of_memory();
  // What was held when memory last ran out: by the time anybody asks, much of it is freed.
  const std::vector<BlockRow>& blocks_at_out_of_memory() const { return oom_blocks_; }
  template <typename F>
  auto with_allocator(F&& use) {
    std::lock_guard<std::mutex> lock(mutex_);
    return use(*allocator_);
  }

  uint64_t ticket(int64_t stream) override;
  bool passed(int64_t stream, uint64_t ticket) override;
  CapturePoint captured(int64_t stream) override;

 private:
  struct StreamState {
    int64_t tail_ns = 0;
    uint64_t issued = 0;
    std::vector<uint64_t> horizon;
    std::deque<int64_t> queue_ns;  // ends of its last launches, as many as its queue is deep
    int branch = -1;               // of the graph that is being captured, or -1
  };
  void wait_for_room(StreamState& state);
  void reckon(int64_t stream);
  int64_t run(int64_t stream, uint32_t signature, const CallCost& cost, Queueing queueing);
  void wait_in_graph(const EventState& event, StreamState& state);
  void check_synchronizes(const StreamState& state);
  void complete(const std::vector<uint64_t>& horizon, int64_t time_ns);
  [[noreturn]] void raise_out_of_memory(size_t bytes);

  const int index_;
  std::mutex mutex_;
  std::vector<StreamState> streams_;
  BusyTimes busy_;
  std::shared_ptr<RecordedGraph> graph_;  // that is being captured here
  std::vector<uint64_t> completed_;  // per stream: ops that the host knows to be done
  int next_stream_[2] = {0, 0};
  int64_t kernels_ns_ = 0;
  std::unique_ptr<CachingAllocator> allocator_;
  MemoryHistory history_;
  Block* allocate(size_t bytes, int64_t stream, int32_t origin);
  std::array<int64_t, 2> peaks_{};
  std::vector<BlockRow> oom_blocks_;
  size_t blas_workspace_bytes_;
  int64_t multiprocessors_;
  std::vector<std::bitset<kStreams>> blas_workspaces_;  // by handle: the streams that have theirs
  std::vector<Block*> blas_blocks_;
};

int device_count();
Device& device(int index);  // raises for an ordinal that the node does not have
void configure_devices(int count, const DeviceSettings& settings);

int current_device();
void set_current_device(int index);
int64_t current_stream(int device_index);
void set_current_stream(int device_index, int64_t stream);

int64_t host_time_ns();
void advance_host(int64_t by_ns);
void add_host_time(int64_t by_ns);  // of a launch, which the spans are told of with the rest of it
void host_waits_until(int64_t time_ns);
// With a kernel model, record_stream frees are timed; without, they wait for a synchronization.
void set_timed(bool timed);

// The signature of the op that this thread is executing: blocks remember who made them.
void set_current_op(uint32_t signature);
uint32_t current_op();

}  // namespace prismscale
