// The span graph: the work of the host and of every stream, condensed to a few nodes per span.
//
// Let the host issue ops 1 to n to one stream. Issuing op i costs the host h_i, and running it
// takes the stream d_i. They end at
//
//     max( S + sum(d_i),  H + max_k( h_1 + ... + h_k + d_k + ... + d_n ) )
//
// where S and H are the times at which stream and host are done with everything before. Each term
// is one node: *work* comes after the stream's frontier, the *launch* path after the host's
// frontier. A frontier is a set of nodes; it is done when all of them are. So a span of any number
// of ops is two nodes, and it is exactly as long as if each op were a node.
//
// A span is cut where another lane synchronizes with the stream (events, communications) and where
// the host waits: after a wait the host's time is no longer the sum of its costs.
//
// The queue of a stream holds `depth` launches, and the next launch blocks the host (device.h). A
// wait for each launch would need a node for each. So the host waits at *points* only: at
// communications on the device, at changes of labels, and where a stream has taken `depth` / 8
// launches since the last point. All lanes are cut at a point. If a queue could overflow before the
// next point, the host waits for the stream's frontier at an earlier point: the first one that
// makes room for a quarter of the depth. So the host is never more than `depth` launches ahead, and
// is blocked only if it is at least 5/8 of that ahead. Counting begins with the first communication
// or change of labels: ranks that build their model with more or fewer launches must not look
// different for that reason.
//
// The host waits only for points of the same step, and an optimizer has no points. There are two
// reasons. An edge into an earlier step keeps changing until everything between the two repeats, so
// a program would settle later, and one with small steps many steps later. And a program's first
// optimizer call also creates the optimizer's state, so its points would lie elsewhere. What this
// leaves out: the first `depth` launches of a step do not count those of the step before, so at
// most twice the depth, plus the optimizer's launches, are unfinished there. Steps of fewer
// launches than the depth have no bound at all. The length of the steady step stays the same. With
// host time h and device time d in a step, a wait for what happened m steps before closes a cycle
// of at most h + d in m steps. Per step that is, for m >= 2, at most max(h, d): what a step takes
// anyway.
// Communications are not counted: they run on streams of their own.
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
// Whether a launch takes a place in its stream's queue. Views and launches inside a graph do not.
enum Queueing : bool { kNotQueued, kQueued };

class SpanGraph {
 public:
  static SpanGraph& get();

  // Starts a new graph. Positions count from 0 again, and no node has predecessors from before.
  void begin();
  // Sets the labels of all later nodes and cuts all lanes. `held`: full queues block the host
  // there.
  void set_labels(int32_t work, int32_t launch, bool held);
  void close();       // cuts all lanes
  void step_ended();  // launches are counted from 0 again

  // Called by the devices. Without effect before begin() and while is_without_cost().
  void host_worked(int64_t host_ns);
  // `waited_ns`: time for which the kernel waits for kernels of other streams before it runs.
  void launched(
      int device, int64_t stream, uint32_t signature, int64_t host_ns, int64_t device_ns,
      int64_t waited_ns, Queueing queueing);
  // The stream's last work ends `by_ns` later, because of kernels of other streams.
  void moved(int device, int64_t stream, int64_t by_ns);
  Frontier recorded(int device, int64_t stream);
  void waits(int device, int64_t stream, const Frontier& events);
  void host_waits(int device, int64_t stream);
  void host_waits(const Frontier& events);

  // Called for the recorder of communications. Its nodes and these share one count of positions.
  Frontier issued(int device, int64_t stream, bool by_host);
  // Counts a batch of communications that comes after `preds`. In a channel (-1: none) each batch
  // comes after the one before.
  void took_positions(int32_t count, int32_t channel, const Frontier& preds);
  void joined(int device, int64_t stream, const Frontier& nodes, bool by_host);

  int32_t label() const { return work_label_; }  // of the program's current phase
  int64_t pending_rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t pending_preds() const { return static_cast<int64_t>(preds_.size()); }
  void drain(SpanRow* rows, int32_t* preds);

  // The launches behind each node since begin(). With them a node's cost can be computed again.
  const std::vector<LaunchRow>& launch_rows() const { return launch_rows_; }
  const std::vector<NodeRow>& node_rows() const { return node_rows_; }

 private:
  // All that a node comes after: for each chain, the last position in it before the node, or the
  // node's own. A chain is a lane or channel, whose nodes follow one another. With clocks a
  // frontier can drop a node that precedes another of its nodes. Otherwise lanes that only wait
  // would collect predecessors without end.
  using Clock = std::vector<int32_t>;
  struct Node {
    int32_t chain;
    Clock clock;
  };
  struct Point {
    int64_t launches;  // of its stream in this step, up to this point
    Frontier frontier;
  };
  struct Stream {
    int16_t lane = 0;
    int32_t chain = 0, launch_chain = 0;
    Frontier frontier;
    // The open span; there is none while `ops` is 0.
    int64_t ops = 0;
    int64_t work_ns = 0, launch_ns = 0;
    int64_t host_base_ns = 0;  // host_ns_ at `host_frontier`
    Frontier host_frontier;
    // Of launch_rows_: the span's first row, and the host's first row after `host_frontier`.
    int32_t first_row = 0, since_row = 0;
    // Launches of this step: all, those up to the last point, and as many as surely find room.
    int64_t launches = 0, at_point = 0, room = 0;
    std::deque<Point> points;  // for which the host may still wait, oldest first
  };
  Stream& stream_of(int device, int64_t stream);
  Frontier frontier_of(int device, int64_t stream);
  void open(Stream& state);
  void append_stated(int64_t ns, int16_t lane);
  void host_joins(const Frontier& nodes);
  void point();
  void make_room(Stream& stream);
  void cut(Stream& stream);
  void cut_host(bool even_if_empty = false);
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
  std::map<int32_t, int32_t> channels_;  // each one's chain
  int32_t chains_ = 0;
  std::vector<Node> nodes_;   // by position, communications included
  Frontier host_frontier_;
  int64_t host_ns_ = 0;       // time that the host has worked, without its waits
  int64_t host_cut_ns_ = 0;   // host_ns_ at host_frontier_
  int32_t host_cut_row_ = 0;  // size of launch_rows_ at host_frontier_
  int32_t work_label_ = 0, launch_label_ = 0;
  bool held_ = true, counts_ = false, is_labelled_ = false;
  bool step_begins_ = false;  // the host has no span yet since an optimizer call ended
  std::vector<LaunchRow> launch_rows_;
  std::vector<NodeRow> node_rows_;
  std::vector<SpanRow> rows_;
  std::vector<int32_t> preds_;
};

// Launches that a stream's queue holds; the next one blocks the host.
int64_t launch_queue_depth();
void set_launch_queue_depth(int64_t depth);

// While set, this thread's ops cost nothing and enter no span: they are the emulation's own work.
bool is_without_cost();
void set_without_cost(bool without_cost);

}  // namespace prismscale
