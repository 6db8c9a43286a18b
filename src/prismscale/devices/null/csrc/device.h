// The null devices: each has streams with logical time and one model of the caching allocator.
//
// Logical time: issuing an op costs the host `host_ns`. The op then runs on its stream for
// `device_ns`, starting when the host has issued it and the stream is free. Events and waits carry
// these times. The launch queue of a stream has a limited depth. A launch into a full queue blocks
// the host until the oldest launch in the queue is done.
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
constexpr int kGraphBranches = 16;  // most streams in one captured graph
constexpr int64_t kFirstBranchStream = 1 + 2 * kStreamsPerPool;  // replays branch 1 of a graph
constexpr int kStreams = static_cast<int>(kFirstBranchStream) + kGraphBranches - 1;
constexpr int64_t kCaptured = -1;  // start time of a launch that was only recorded in a capture

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
  Frontier frontier;              // the same as nodes of the span graph (spans.h)
  std::shared_ptr<RecordedGraph> graph;  // whose capture recorded the event; else null
  uint32_t place = 0;                    // the event's number in `graph`
};

class Device : public StreamProgress {
 public:
  Device(int index, const DeviceSettings& settings);

  // Applies settings before the program's first tensor, or between two allocations.
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
  void settle(int64_t stream);  // delays the stream's end as kernels of other streams require
  int64_t kernels_ns();  // total duration of all kernels launched on this device

  // Capture of graphs: launches on the capture's streams, and events between them, are recorded.
  void begin_capture(std::shared_ptr<RecordedGraph> graph, int64_t stream);
  void end_capture();
  bool is_capturing(int64_t stream);
  bool called(int64_t stream, uint32_t call, CallKind kind, uint32_t joins);
  // Replay: the host launches the graph once, and the launches inside it follow without host time.
  // The graph takes one place in the stream's queue until all of them are done.
  int64_t launch_graph(int64_t stream, uint32_t signature, int64_t host_ns);
  int64_t launch_in_graph(int64_t stream, uint32_t signature, const CallCost& cost);
  void graph_launched(int64_t stream);
  bool begin_pool_of_capture(PoolId id);  // for all threads' allocations on the capture's streams
  void advance_stream(int64_t stream, int64_t until_ns);

  // Memory. `malloc` raises torch's OutOfMemoryError.
  Block* malloc(size_t bytes, int64_t stream);
  void free(Block* block);
  void empty_cache(PoolId id);
  void record_stream(Block* block, int64_t stream);
  void use_blas(int64_t stream);
  int64_t multiprocessors() const { return multiprocessors_; }
  void clear_blas();
  // Peak bytes {allocated, reserved} since the last call. Programs cannot reset these peaks.
  std::array<int64_t, 2> take_peaks();
  std::vector<BlockRow> blocks();
  void record_memory(bool on);
  // Moves all rows to `out`, oldest first, or none if `capacity` is too small. Returns their
  // number.
  int64_t take_memory_rows(MemoryRow* out, int64_t capacity);
  // Saves the current blocks: memory ran out, in this allocator or outside it.
  void note_out_of_memory();
  // The blocks when memory last ran out. By the time they are asked for, many of them are freed.
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
    std::deque<int64_t> queue_ns;  // end times of the launches in its queue
    int branch = -1;               // its branch of the graph under capture; -1: takes no part
  };
  void wait_for_room(StreamState& state);
  void reckon(int64_t stream);
  int64_t run(int64_t stream, uint32_t signature, const CallCost& cost, Queueing queueing);
  void wait_in_graph(const EventState& event, StreamState& state);
  void check_synchronizes(const StreamState& state);
  void complete(const std::vector<uint64_t>& horizon, int64_t time_ns);
  void wait_to_give_back();
  [[noreturn]] void raise_out_of_memory(size_t bytes);

  const int index_;
  std::mutex mutex_;
  std::vector<StreamState> streams_;
  BusyTimes busy_;
  std::shared_ptr<RecordedGraph> graph_;  // under capture on this device, or null
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
  std::vector<std::bitset<kStreams>> blas_workspaces_;  // by cuBLAS handle: streams that have one
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
void add_host_time(int64_t by_ns);  // host time of a launch; SpanGraph::launched() also gets it
void host_waits_until(int64_t time_ns);
// With a kernel model (timed), a block that other streams have used becomes free at their logical
// time. Without one, it becomes free at the next synchronization.
void set_timed(bool timed);

// The signature of the op that this thread is executing. Blocks store it as `made_by`.
void set_current_op(uint32_t signature);
uint32_t current_op();

}  // namespace prismscale
