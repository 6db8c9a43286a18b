// How kernels of several streams share the multiprocessors of a device.
//
// A kernel of a training step has blocks for all multiprocessors, and a GPU dispatches the blocks
// of one kernel after those of another. So kernels of several streams take turns. A kernel whose
// stream has reached it waits for the kernel that runs, and then runs before kernels that are due
// later. Two streams that both have work alternate, kernel by kernel. Only a kernel's launch
// latency, in which it has no block yet, overlaps with other kernels: it is not part of the
// kernel's *busy* time. Copies by a copy engine are never busy. Communications are not modelled
// here: what they take from computation is part of their own model.
//
// A kernel is placed when the host launches it. Kernels of other streams that were launched before
// it but are due while it runs move behind it, and so do kernels that follow them on their streams,
// as far as the time in which these streams are idle does not make up for it. Such a stream may end
// later (`end_ns`) than was assumed before, and its next user must take that into account. Events
// recorded before the move keep their time, which is too early by as much. With three or more
// streams, kernels that move are not checked against each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace prismscale {

// Cost of a call on the device and on the host.
struct CallCost {
  int64_t device_ns = 0, host_ns = 0;
  int64_t busy_ns = 0;  // last part of device_ns, in which no kernel of another stream runs
};

class BusyTimes {
 public:
  explicit BusyTimes(int streams) : streams_(static_cast<size_t>(streams)) {}

  // Places a kernel that could begin at `start_ns` if its stream were alone. Returns how long it
  // waits for kernels of other streams. No kernel placed later begins before `now_ns`.
  int64_t place(int64_t stream, int64_t start_ns, const CallCost& cost, int64_t now_ns);
  // Returns the end of the stream's last busy interval that is stored; 0 if there is none.
  int64_t end_ns(int64_t stream) const;

 private:
  struct Interval {
    int64_t start_ns, end_ns;
    int64_t latency_ns;  // of the kernel's launch, after the end of the kernel before it
  };
  using Intervals = std::deque<Interval>;  // disjoint, ascending

  int64_t end_of_running(size_t stream, int64_t at_ns) const;
  void move_others(size_t stream, const Interval& placed);
  void forget_before(int64_t now_ns);

  std::vector<Intervals> streams_;
  std::vector<size_t> used_;  // streams that have had any interval
};

}  // namespace prismscale
