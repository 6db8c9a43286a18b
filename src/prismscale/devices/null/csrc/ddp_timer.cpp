// The timer that DistributedDataParallel's Reducer looks up for the device of its parameters.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "device.h"

namespace prismscale {
namespace {

// Reads the host's logical time. DDP only logs these figures.
class NullTimer final : public c10d::Timer {
 public:
  explicit NullTimer(c10::Device) {}
  void record(Event event) override { getTimeRef(event) = host_time_ns(); }
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from == c10d::kUnsetTime || to == c10d::kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};

}  // namespace

void register_ddp_timer() {
  c10d::TimerRegistry()->Register(
      c10::DeviceType::CUDA,
      [](c10::Device device) { return std::unique_ptr<c10d::Timer>(new NullTimer(device)); },
      c10::REGISTRY_PREFERRED);  // before the one that a CUDA build has registered
}

}  // namespace prismscale
