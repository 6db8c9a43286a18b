// The part of Device that serves CUDA graphs: streams under capture, and launches of replays.
#include <c10/util/Exception.h>

#include <algorithm>

#include "graph_capture.h"

namespace prismscale {

// A stream that waits for an event of the capture joins the capture.
void Device::wait_in_graph(const EventState& event, StreamState& state) {
  if (!event.graph) {
    // Work inside the capture cannot wait for work outside it.
    graph_->is_broken = true;
    raise_cuda(kCaptureIsolation);
  }
  if (!event.graph->is_open) raise_cuda(kCapturedEvent);
  if (event.graph != graph_) raise_cuda(kCaptureMerge);
  if (state.branch < 0) {
    state.branch = graph_->join();
    TORCH_CHECK_NOT_IMPLEMENTED(state.branch >= 0, "A CUDA graph on the null device has at most ",
                                kGraphBranches, " streams; this one takes in more");
  }
  graph_->waited(state.branch, event);
}

void Device::begin_capture(std::shared_ptr<RecordedGraph> graph, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  graph_ = std::move(graph);
  streams_[static_cast<size_t>(stream)].branch = 0;
  allocator_->capture_begins();
}

void Device::end_capture() {
  std::lock_guard<std::mutex> lock(mutex_);
  graph_.reset();
  for (StreamState& state : streams_) state.branch = -1;
  allocator_->capture_ends();
}

bool Device::is_capturing(int64_t stream) {
  if (open_graph() == nullptr) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_[static_cast<size_t>(stream)].branch >= 0;
}

bool Device::called(int64_t stream, uint32_t call, CallKind kind, uint32_t joins) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!graph_) return false;
  int& branch = streams_[static_cast<size_t>(stream)].branch;
  if (branch < 0 && kind == CallKind::kJoin) branch = graph_->join();
  const int place = branch < 0 && kind == CallKind::kMark ? 0 : branch;
  if (place >= 0) graph_->called(place, call, kind, joins);
  return place >= 0;
}

CapturePoint Device::captured(int64_t stream) {
  const int branch = streams_[static_cast<size_t>(stream)].branch;
  return graph_ && branch >= 0 ? graph_->point(branch) : CapturePoint();
}

bool Device::begin_pool_of_capture(PoolId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  return allocator_->begin_pool(
      id, [this](int64_t stream) { return streams_[static_cast<size_t>(stream)].branch >= 0; });
}

int64_t Device::launch_graph(int64_t stream, uint32_t signature, int64_t host_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  if (is_without_cost()) return state.tail_ns;
  wait_for_room(state);
  add_host_time(host_ns);
  SpanGraph::get().launched(index_, stream, signature, host_ns, 0, 0, kQueued);
  return std::max(state.tail_ns, host_time_ns());
}

int64_t Device::launch_in_graph(int64_t stream, uint32_t signature, const CallCost& cost) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  state.issued += 1;
  if (is_without_cost()) return state.tail_ns;
  return run(stream, signature, cost, kNotQueued);
}

void Device::graph_launched(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = streams_[static_cast<size_t>(stream)];
  if (!is_without_cost()) state.queue_ns.push_back(state.tail_ns);
}

}  // namespace prismscale
