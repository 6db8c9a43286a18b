// How kernels of several streams share the multiprocessors of a device.
//
// A kernel of a training step has blocks for all multiprocessors, and a GPU dispatches the blocks of
// one kernel after those of another. So kernels of several streams take turns: one whose stream has
// come to it waits for the kernel that runs, and then runs before kernels that are due later. Two
// streams that both have work alternate, kernel by kernel. Only the launch latency of a kernel, in
// which it has no block yet, passes beside others: it is not part of the kernel's *busy* time. Copies
// by a copy engine are never busy, and communications are none of this: what they take from
// computation is part of their own model.
//
// A kernel is placed when the host launches it. Kernels of other streams that were launched before it
// and are due later move behind it, and with them all that follows on their streams. A stream that
// was moved ends later (`end_ns`) than it was thought to; whoever looks at it next must reckon with
// that. Events that were recorded before keep their time, which is early by as much. With three
// streams and more, kernels that move are not held against each other.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace prismscale {

// What a call costs the device and the host.
struct CallCost {
  int64_t device_ns = 0, host_ns = 0;
  int64_t busy_ns = 0;  // of the device's time, at its end: in it no kernel of another stream runs
};

class BusyTimes {
 public:
  explicit BusyTimes(int streams) : streams_(static_cast<size_t>(streams)) {}

  // Places a kernel that could begin at `start_ns` if its stream were alone. Returns how long it
  // waits for kernels of other streams. `now_ns`: no later kernel begins before it.
  int64_t place(int64_t stream, int64_t start_ns, const CallCost& cost, int64_t now_ns);
  // When the stream's last busy kernel ends, as far as it is known.
  int64_t end_ns(int64_t stream) const;

 private:
  struct Interval {
    int64_t start_ns, end_ns;
  };
  using Intervals = std::deque<Interval>;  // disjoint, ascending

  int64_t end_of_running(size_t stream, int64_t at_ns) const;
  void move_others(size_t stream, const Interval& placed);
  void forget_before(int64_t now_ns);

  std::vector<Intervals> streams_;
  std::vector<size_t> used_;  // streams that have had any interval
};

}  // namespace prismscale
