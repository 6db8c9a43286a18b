// What the host and every stream do between two cuts, condensed to a few nodes of a graph.
//
// Ops issued at host costs h_i to a stream that runs them for d_i end at
//
//     max( S + sum(d_i),  H + max_k( h_1 + ... + h_k + d_k + ... + d_n ) )
//
// where S is when the stream and H when the host was done with what came before. Both terms are plain
// nodes: *work* after the stream's frontier, and a *launch* path after the host's. A frontier is a
// set of nodes; it is done when all of them are. So a span of any number of ops is two nodes and
// exactly as long as if each op were one.
//
// A span is cut where another lane meets the stream (events, communications) and where the host
// waits: after that the host's time is no longer the sum of its costs.
//
// A stream takes `depth` launches before the next one holds the host (device.h). A wait for each
// launch would be a node for each, so the host waits at *points*: communications on the device,
// changes of labels, and wherever a stream has taken `depth` / 8 launches since the last point. All
// lanes are cut there. If a stream could overflow before the next point, the host waits for what the
// stream had at an earlier point, the first that makes room for a quarter of the depth. So the host
// goes no further ahead than `depth` launches, and is held at no fewer than 5/8 of that. Counting
// begins with the first communication or change of labels: ranks that make their model with more or
// fewer launches must not look different for that.
//
// It waits for points of the same step only, and there are none in an optimizer. An edge into an
// earlier step differs until all that lies between repeats, so a program would settle later, one of
// small steps many steps later; and a program's first optimizer call also makes the optimizer's state,
// so that points would lie elsewhere in it. What is left out: in the first `depth` launches of a step
// those of the step before do not count, so at most twice the depth, and the optimizer's launches, are
// unfinished there. Steps of fewer launches than the depth have no bound at all. The steady step is
// as long: with host time h and device time d in a step, a wait for what happened m steps before
// closes a cycle of at most h + d in m steps, which for m >= 2 is not above max(h, d), what a step
// takes anyway. Communications are not counted: they run on streams of their own.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "capi.h"

namespace prismscale {

using Frontier = std::vector<int32_t>;
enum Path : int16_t { kWork, kLaunch, kHost };
// A launch takes a place in the queue of its stream; a view does not, nor what a graph launches.
enum Queueing : bool { kNotQueued, kQueued };

class SpanGraph {
 public:
  static SpanGraph& get();

  // Positions count from 0 again; what happened before is nobody's predecessor.
  void begin();
  // Of what follows; cuts all lanes. `held`: full queues hold the host there.
  void set_labels(int32_t work, int32_t launch, bool held);
  void close();       // cuts all lanes
  void step_ended();  // launches are counted from here

  // What the devices tell. Nothing happens before begin() and within a WithoutCostScope.
  void host_worked(int64_t host_ns);
  // `waited_ns`: how long the kernel waits for those of other streams before it runs.
  void launched(
      int device, int64_t stream, uint32_t signature, int64_t host_ns, int64_t device_ns,
      int64_t waited_ns, Queueing queueing);
  // What the stream does last ends so much later, for kernels of other streams.
  void moved(int device, int64_t stream, int64_t by_ns);
  Frontier recorded(int device, int64_t stream);
  void waits(int device, int64_t stream, const Frontier& events);
  void host_waits(int device, int64_t stream);
  void host_waits(const Frontier& events);

  // What the recorder of communications does, whose nodes share the count of positions.
  Frontier issued(int device, int64_t stream, bool by_host);
  // A batch of communications came after `preds`. In a channel (-1: none) each batch comes after the
  // one before.
  void took_positions(int32_t count, int32_t channel, const Frontier& preds);
  void joined(int device, int64_t stream, const Frontier& nodes, bool by_host);

  int32_t label() const { return work_label_; }  // of what the program does
  int64_t pending_rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t pending_preds() const { return static_cast<int64_t>(preds_.size()); }
  void drain(SpanRow* rows, int32_t* preds);

  // What the nodes since begin() are made of, so that they can be costed anew.
  const std::vector<LaunchRow>& launch_rows() const { return launch_rows_; }
  const std::vector<NodeRow>& node_rows() const { return node_rows_; }

 private:
  // What a node comes after: of each chain (lane or channel, whose nodes follow one another), the
  // last position before it, or its own. One of two nodes of a frontier that precedes the other
  // can be left out, or lanes that only wait would collect predecessors without end.
  using Clock = std::vector<int32_t>;
  struct Node {
    int32_t chain;
    Clock clock;
  };
  struct Point {
    int64_t launches;  // of its stream in this step, up to there
    Frontier frontier;
  };
  struct Stream {
    int16_t lane = 0;
    int32_t chain = 0, launch_chain = 0;
    Frontier frontier;
    // The open span, while `ops` is not 0.
    int64_t ops = 0;
    int64_t work_ns = 0, launch_ns = 0;
    int64_t host_base_ns = 0;  // host_ns_ where `host_frontier` was reached
    Frontier host_frontier;
    int32_t first_row = 0, since_row = 0;  // of launch_rows_: its first, and the host's since then
    // Launches of this step: all, those before the last point, and how many room is known for.
    int64_t launches = 0, at_point = 0, room = 0;
    std::deque<Point> points;  // that may still be waited for, oldest first
  };
  Stream& stream_of(int device, int64_t stream);
  Frontier frontier_of(int device, int64_t stream);
  void open(Stream& state);
  void append_stated(int64_t ns, int16_t lane);
  void host_joins(const Frontier& nodes);
  void point();
  void make_room(Stream& stream);
  void cut(Stream& stream);
  void cut_host();
  void cut_all();
  bool precedes(int32_t node, int32_t other) const;
  void extend(Frontier& frontier, const Frontier& nodes) const;
  void merge(Clock& clock, int32_t node) const;
  static void enter(Node& node, int32_t chain, int32_t position);
  int32_t append(int16_t lane, int32_t label, int64_t duration_ns, const Frontier& preds);
  int32_t row() const { return static_cast<int32_t>(launch_rows_.size()); }

  std::mutex mutex_;
  bool on_ = false;
  std::map<std::pair<int, int64_t>, Stream> streams_;
  std::map<int32_t, int32_t> channels_;  // chain of each
  int32_t chains_ = 0;
  std::vector<Node> nodes_;   // by position, communications included
  Frontier host_frontier_;
  int64_t host_ns_ = 0;       // what the host has worked, without its waits
  int64_t host_cut_ns_ = 0;   // host_ns_ where host_frontier_ was reached
  int32_t host_cut_row_ = 0;  // launch_rows_ there
  int32_t work_label_ = 0, launch_label_ = 0;
  bool held_ = true, counts_ = false, is_labelled_ = false;
  std::vector<LaunchRow> launch_rows_;
  std::vector<NodeRow> node_rows_;
  std::vector<SpanRow> rows_;
  std::vector<int32_t> preds_;
};

// Launches that a stream takes before the next one holds the host.
int64_t launch_queue_depth();
void set_launch_queue_depth(int64_t depth);

// While it lasts, this thread's ops cost nothing and are nobody's: the emulation's own work.
bool is_without_cost();
void set_without_cost(bool without_cost);

}  // namespace prismscale
