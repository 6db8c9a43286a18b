// Kernels of several streams take turns; see sharing.h.
#include "sharing.h"

#include <algorithm>

namespace prismscale {
namespace {

// Most intervals that are kept of a stream. If the host never waits, they would grow without end.
constexpr size_t kMostIntervals = size_t{1} << 18;

}  // namespace

int64_t BusyTimes::place(
    int64_t stream, int64_t start_ns, const CallCost& cost, int64_t now_ns) {
  if (cost.busy_ns <= 0) return 0;
  const auto own = static_cast<size_t>(stream);
  forget_before(now_ns);
  const int64_t due_ns = start_ns + cost.device_ns - cost.busy_ns;
  const int64_t runs_ns = end_of_running(own, due_ns);
  const Interval placed{runs_ns, runs_ns + cost.busy_ns, cost.device_ns - cost.busy_ns};
  move_others(own, placed);
  if (std::find(used_.begin(), used_.end(), own) == used_.end()) used_.push_back(own);
  Intervals& intervals = streams_[own];
  intervals.push_back(placed);
  if (intervals.size() > kMostIntervals) intervals.pop_front();
  return runs_ns - due_ns;
}

int64_t BusyTimes::end_ns(int64_t stream) const {
  const Intervals& intervals = streams_[static_cast<size_t>(stream)];
  return intervals.empty() ? 0 : intervals.back().end_ns;
}

// Returns the first time from `at_ns` on at which no kernel of another stream runs.
int64_t BusyTimes::end_of_running(size_t stream, int64_t at_ns) const {
  for (bool is_free = false; !is_free;) {
    is_free = true;
    for (const size_t other : used_) {
      const Intervals& intervals = streams_[other];
      if (other == stream || intervals.empty() || intervals.back().end_ns <= at_ns) continue;
      const auto next = std::upper_bound(
          intervals.begin(), intervals.end(), at_ns,
          [](int64_t ns, const Interval& interval) { return ns < interval.end_ns; });
      if (next->start_ns > at_ns) continue;
      at_ns = next->end_ns;
      is_free = false;
    }
  }
  return at_ns;
}

void BusyTimes::move_others(size_t stream, const Interval& placed) {
  for (const size_t other : used_) {
    Intervals& intervals = streams_[other];
    if (other == stream || intervals.empty() || intervals.back().end_ns <= placed.start_ns)
      continue;
    auto next = std::lower_bound(
        intervals.begin(), intervals.end(), placed.start_ns,
        [](const Interval& interval, int64_t ns) { return interval.start_ns < ns; });
    if (next == intervals.end() || next->start_ns >= placed.end_ns) continue;
    // The first has waited: its latency has passed by then.
    int64_t from_ns = placed.end_ns;
    while (next != intervals.end() && next->start_ns < from_ns) {
      next->end_ns += from_ns - next->start_ns;
      next->start_ns = from_ns;
      from_ns = next->end_ns;
      if (++next != intervals.end()) from_ns += next->latency_ns;
    }
  }
}

void BusyTimes::forget_before(int64_t now_ns) {
  for (const size_t stream : used_) {
    Intervals& intervals = streams_[stream];
    while (!intervals.empty() && intervals.front().end_ns <= now_ns) intervals.pop_front();
  }
}

}  // namespace prismscale
