// Condensed spans of host and streams; see spans.h.
#include "spans.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "device.h"

namespace prismscale {
namespace {

constexpr int16_t kHostLane = 0, kNoLane = -1;
constexpr int32_t kHostChain = 0, kNoChain = -1;

thread_local bool t_without_cost = false;
std::atomic<int64_t> g_queue_depth{std::numeric_limits<int64_t>::max()};

int64_t most_between_points() { return std::max<int64_t>(1, launch_queue_depth() / 8); }

}  // namespace

bool is_without_cost() { return t_without_cost; }
void set_without_cost(bool without_cost) { t_without_cost = without_cost; }
int64_t launch_queue_depth() { return g_queue_depth.load(std::memory_order_relaxed); }
void set_launch_queue_depth(int64_t depth) {
  g_queue_depth = std::max<int64_t>(1, depth);
}

SpanGraph& SpanGraph::get() {
  static auto* graph = new SpanGraph();
  return *graph;
}

void SpanGraph::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  on_ = true;
  streams_.clear();
  channels_.clear();
  chains_ = kHostChain + 1;
  nodes_.clear();
  host_frontier_.clear();
  host_cut_ns_ = host_ns_;
  host_cut_row_ = 0;
  counts_ = is_labelled_ = step_begins_ = false;
  launch_rows_.clear();
  node_rows_.clear();
  rows_.clear();
  preds_.clear();
}

void SpanGraph::set_labels(int32_t work, int32_t launch, bool held) {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_ = counts_ || is_labelled_;
  is_labelled_ = true;
  if (held_) {
    point();
  } else {
    cut_all();
  }
  work_label_ = work;
  launch_label_ = launch;
  held_ = held;
}

void SpanGraph::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  cut_all();
}

void SpanGraph::step_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  step_begins_ = true;
  for (auto& [key, state] : streams_) {
    state.launches = state.at_point = state.room = 0;
    state.points.clear();
  }
}

void SpanGraph::host_worked(int64_t host_ns) {
  if (!on_ || t_without_cost) return;
  std::lock_guard<std::mutex> lock(mutex_);
  host_ns_ += host_ns;
  append_stated(host_ns, kNoLane);
}

void SpanGraph::append_stated(int64_t ns, int16_t lane) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (int64_t left = ns; left > 0; left -= kMost) {
    launch_rows_.push_back({static_cast<int32_t>(std::min(left, kMost)), lane, kStated});
  }
}

void SpanGraph::launched(
    int device, int64_t stream, uint32_t signature, int64_t host_ns, int64_t device_ns,
    int64_t waited_ns, Queueing queueing) {
  if (!on_ || t_without_cost) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& state = stream_of(device, stream);
  host_ns_ += host_ns;
  open(state);
  launch_rows_.push_back({static_cast<int32_t>(signature), state.lane, kCosted});
  append_stated(waited_ns, state.lane);
  state.work_ns += waited_ns + device_ns;
  state.launch_ns =
      std::max(state.launch_ns, host_ns_ - state.host_base_ns) + waited_ns + device_ns;
  if (queueing == kQueued && counts_) state.launches += 1;
  if (held_ && state.launches - state.at_point >= most_between_points()) point();
}

void SpanGraph::moved(int device, int64_t stream, int64_t by_ns) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& state = stream_of(device, stream);
  open(state);
  append_stated(by_ns, state.lane);
  state.work_ns += by_ns;
  state.launch_ns = std::max(state.launch_ns, host_ns_ - state.host_base_ns) + by_ns;
}

// Counts one op more in the stream's open span, which begins here if it has none.
void SpanGraph::open(Stream& state) {
  if (state.ops++ > 0) return;
  state.work_ns = 0;
  state.launch_ns = 0;
  state.host_frontier = host_frontier_;
  state.host_base_ns = host_cut_ns_;
  state.first_row = row();
  state.since_row = host_cut_row_;
}

Frontier SpanGraph::recorded(int device, int64_t stream) {
  if (!on_ || t_without_cost) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  return frontier_of(device, stream);
}

void SpanGraph::waits(int device, int64_t stream, const Frontier& events) {
  if (!on_ || t_without_cost || events.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& state = stream_of(device, stream);
  cut(state);
  extend(state.frontier, events);
}

void SpanGraph::host_waits(int device, int64_t stream) {
  if (!on_ || t_without_cost) return;
  std::lock_guard<std::mutex> lock(mutex_);
  host_joins(frontier_of(device, stream));
}

void SpanGraph::host_waits(const Frontier& events) {
  if (!on_ || t_without_cost) return;
  std::lock_guard<std::mutex> lock(mutex_);
  host_joins(events);
}

Frontier SpanGraph::issued(int device, int64_t stream, bool by_host) {
  if (!on_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  // A step that begins with a communication of the host's has the host's beginning before it: where
  // a rank stops that does not come to it.
  cut_host(/*even_if_empty=*/by_host && step_begins_);
  Frontier preds = host_frontier_;
  if (by_host) return preds;
  extend(preds, frontier_of(device, stream));
  counts_ = true;
  if (held_) point();
  return preds;
}

void SpanGraph::took_positions(int32_t count, int32_t channel, const Frontier& preds) {
  std::lock_guard<std::mutex> lock(mutex_);
  Node node{kNoChain, {}};
  for (const int32_t pred : preds) merge(node.clock, pred);
  if (channel >= 0) {
    const auto [found, is_new] = channels_.try_emplace(channel, chains_);
    if (is_new) chains_ += 1;
    // All members get the position of the first one: they do not follow one another.
    enter(node, found->second, static_cast<int32_t>(nodes_.size()));
  }
  nodes_.insert(nodes_.end(), static_cast<size_t>(count), node);
}

void SpanGraph::joined(int device, int64_t stream, const Frontier& nodes, bool by_host) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (by_host) {
    host_joins(nodes);
    return;
  }
  Stream& state = stream_of(device, stream);
  cut(state);
  extend(state.frontier, nodes);
}

void SpanGraph::drain(SpanRow* rows, int32_t* preds) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy(rows_.begin(), rows_.end(), rows);
  std::copy(preds_.begin(), preds_.end(), preds);
  rows_.clear();
  preds_.clear();
}

SpanGraph::Stream& SpanGraph::stream_of(int device, int64_t stream) {
  const auto [found, is_new] = streams_.try_emplace({device, stream});
  if (is_new) {
    found->second.lane = static_cast<int16_t>(streams_.size());
    found->second.chain = chains_++;
    found->second.launch_chain = chains_++;
  }
  return found->second;
}

Frontier SpanGraph::frontier_of(int device, int64_t stream) {
  const auto found = streams_.find({device, stream});
  if (found == streams_.end()) return {};
  cut(found->second);
  return found->second.frontier;
}

// All spans are cut: an open span counts the host's time from before this wait.
void SpanGraph::host_joins(const Frontier& nodes) {
  if (nodes.empty()) return;
  cut_all();
  extend(host_frontier_, nodes);
}

// Cuts even if no queue can overflow. Whether one can depends on how long ago the step began, and
// where nodes end must not depend on that.
void SpanGraph::point() {
  cut_all();
  for (auto& [key, state] : streams_) {
    if (state.launches > state.at_point) state.points.push_back({state.launches, state.frontier});
    state.at_point = state.launches;
  }
  for (auto& [key, state] : streams_) make_room(state);
}

void SpanGraph::make_room(Stream& state) {
  const int64_t depth = launch_queue_depth();
  state.room = std::max(state.room, depth);
  if (state.room - state.launches >= most_between_points()) return;
  auto& points = state.points;
  const int64_t done = state.launches + 2 * most_between_points() - depth;
  while (points.size() > 1 && points.front().launches < done) points.pop_front();
  extend(host_frontier_, points.front().frontier);
  state.room = points.front().launches + depth;
}

void SpanGraph::cut(Stream& state) {
  if (state.ops == 0) return;
  state.ops = 0;
  const int32_t work = append(state.lane, work_label_, state.work_ns, state.frontier);
  // Appended after the work: a breakdown in this order gives the launch path only what exceeds it.
  const int32_t launch = append(state.lane, launch_label_, state.launch_ns, state.host_frontier);
  node_rows_.push_back({work, state.first_row, state.first_row, row(), state.lane, kWork});
  node_rows_.push_back({launch, state.since_row, state.first_row, row(), state.lane, kLaunch});
  enter(nodes_[static_cast<size_t>(work)], state.chain, work);
  // Launch paths do not follow one another. But the stream's next work follows both nodes of a
  // span, and whoever follows a launch path also follows the work node of the same span. So it
  // follows all earlier launch paths too, and these can form a chain.
  enter(nodes_[static_cast<size_t>(launch)], state.launch_chain, launch);
  state.frontier = {work, launch};
}

void SpanGraph::cut_host(bool even_if_empty) {
  if (host_ns_ == host_cut_ns_ && !even_if_empty) return;
  step_begins_ = false;
  const int32_t node = append(kHostLane, launch_label_, host_ns_ - host_cut_ns_, host_frontier_);
  node_rows_.push_back({node, host_cut_row_, host_cut_row_, row(), kHostLane, kHost});
  enter(nodes_[static_cast<size_t>(node)], kHostChain, node);
  host_frontier_ = {node};
  host_cut_ns_ = host_ns_;
  host_cut_row_ = row();
}

void SpanGraph::cut_all() {
  for (auto& [key, state] : streams_) cut(state);
  cut_host();
}

bool SpanGraph::precedes(int32_t node, int32_t other) const {
  if (node == other) return true;
  const int32_t chain = nodes_[static_cast<size_t>(node)].chain;
  const Clock& clock = nodes_[static_cast<size_t>(other)].clock;
  return chain >= 0 && static_cast<size_t>(chain) < clock.size() &&
      clock[static_cast<size_t>(chain)] >= node;
}

void SpanGraph::extend(Frontier& frontier, const Frontier& nodes) const {
  for (const int32_t node : nodes) {
    const auto covers = [&](int32_t other) { return precedes(node, other); };
    if (std::any_of(frontier.begin(), frontier.end(), covers)) continue;
    std::erase_if(frontier, [&](int32_t other) { return precedes(other, node); });
    frontier.push_back(node);
  }
}

void SpanGraph::enter(Node& node, int32_t chain, int32_t position) {
  const auto index = static_cast<size_t>(chain);
  node.chain = chain;
  if (node.clock.size() <= index) node.clock.resize(index + 1, -1);
  node.clock[index] = position;
}

void SpanGraph::merge(Clock& clock, int32_t node) const {
  const Clock& other = nodes_[static_cast<size_t>(node)].clock;
  if (clock.size() < other.size()) clock.resize(other.size(), -1);
  for (size_t chain = 0; chain < other.size(); ++chain) {
    clock[chain] = std::max(clock[chain], other[chain]);
  }
}

int32_t SpanGraph::append(
    int16_t lane, int32_t label, int64_t duration_ns, const Frontier& preds) {
  const auto first = static_cast<int32_t>(preds_.size());
  preds_.insert(preds_.end(), preds.begin(), preds.end());
  rows_.push_back({duration_ns, first, static_cast<int32_t>(preds.size()), label, lane});
  Node node{kNoChain, {}};
  for (const int32_t pred : preds) merge(node.clock, pred);
  nodes_.push_back(std::move(node));
  return static_cast<int32_t>(nodes_.size()) - 1;
}

extern "C" {
#pragma GCC visibility push(default)

void ps_spans_begin() { SpanGraph::get().begin(); }
void ps_spans_label(int32_t work, int32_t launch, int held) {
  SpanGraph::get().set_labels(work, launch, held != 0);
}
void ps_spans_step_ended() { SpanGraph::get().step_ended(); }
void ps_set_launch_queue_depth(int64_t depth) { set_launch_queue_depth(depth); }
void ps_spans_close() { SpanGraph::get().close(); }
void ps_without_cost(int on) { set_without_cost(on != 0); }

int64_t ps_spans_issued(int device, int64_t stream, int by_host, int32_t* preds, int64_t capacity) {
  prismscale::device(device).settle(stream);
  const Frontier found = SpanGraph::get().issued(device, stream, by_host != 0);
  std::copy_n(found.begin(), std::min(capacity, static_cast<int64_t>(found.size())), preds);
  return static_cast<int64_t>(found.size());
}
void ps_spans_took(int32_t count, int32_t channel, const int32_t* preds, int64_t pred_count) {
  SpanGraph::get().took_positions(count, channel, Frontier(preds, preds + pred_count));
}
void ps_spans_joined(int device, int64_t stream, const int32_t* nodes, int64_t count, int by_host) {
  prismscale::device(device).settle(stream);
  SpanGraph::get().joined(device, stream, Frontier(nodes, nodes + count), by_host != 0);
}

void ps_spans_pending(int64_t* rows, int64_t* preds) {
  *rows = SpanGraph::get().pending_rows();
  *preds = SpanGraph::get().pending_preds();
}
void ps_spans_drain(SpanRow* rows, int32_t* preds) { SpanGraph::get().drain(rows, preds); }

void ps_log_sizes(int64_t* launches, int64_t* nodes) {
  *launches = static_cast<int64_t>(SpanGraph::get().launch_rows().size());
  *nodes = static_cast<int64_t>(SpanGraph::get().node_rows().size());
}
void ps_log_copy(LaunchRow* launches, NodeRow* nodes) {
  std::ranges::copy(SpanGraph::get().launch_rows(), launches);
  std::ranges::copy(SpanGraph::get().node_rows(), nodes);
}

#pragma GCC visibility pop
}  // extern "C"

}  // namespace prismscale
