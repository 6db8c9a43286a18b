// Captures and replays of CUDA graphs; see graph_capture.h.
#include "graph_capture.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "fallback.h"
#include "recorder.h"

namespace prismscale {
namespace {

std::shared_ptr<RecordedGraph>& open() {
  static auto* graph = new std::shared_ptr<RecordedGraph>();
  return *graph;
}
std::atomic<bool> g_is_open{false};

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

struct Refusal {
  CudaError error;
  const char* name;
  const char* text;
};
constexpr Refusal kRefusals[] = {
    {kCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {kCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {kCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {kCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {kCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};

std::string text_of(CudaError error) {
  for (const Refusal& refusal : kRefusals) {
    if (refusal.error != error) continue;
    return std::string("CUDA error: ") + refusal.text + "\nSearch for `" + refusal.name +
        "' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
        "information. (null CUDA device of prismscale)";
  }
  return "CUDA error " + std::to_string(static_cast<int>(error));
}

// Signature of the launch of a whole graph. The kernel model gives its host time.
uint32_t launch_signature() {
  static const uint32_t id = register_signature("cuda::graph_launch\x1f\x1f\x1f");
  return id;
}

// In the launch log a replayed launch has a name of its own, because it costs the host nothing.
uint32_t replayed_signature(uint32_t signature) {
  static auto* names = new std::unordered_map<uint32_t, uint32_t>();
  const auto found = names->find(signature);
  if (found != names->end()) return found->second;
  const uint32_t id = register_signature("replayed " + signature_text(signature));
  names->emplace(signature, id);
  return id;
}

}  // namespace

void raise_cuda(CudaError error) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error,
                              text_of(error));
}

RecordedGraph* open_graph() {
  return g_is_open.load(std::memory_order_acquire) ? open().get() : nullptr;
}

void check_capture_allows() {
  RecordedGraph* graph = open_graph();
  if (graph == nullptr || !graph->forbids_here()) return;
  graph->is_broken = true;
  raise_cuda(kCaptureUnsupported);
}

RecordedGraph::RecordedGraph(int device, int64_t stream, CaptureMode mode)
    : device(device), id(next_id()), written(no_written_storages()), mode_(mode),
      clocks_(1, Clock{}) {}

bool RecordedGraph::forbids_here() const {
  return mode_ == CaptureMode::kGlobal ||
      (mode_ == CaptureMode::kThreadLocal && thread_ == std::this_thread::get_id());
}

int RecordedGraph::join() {
  if (clocks_.size() == kGraphBranches) return -1;
  clocks_.push_back(Clock{});
  return static_cast<int>(clocks_.size()) - 1;
}

void RecordedGraph::launched(int branch, uint32_t signature, const CallCost& cost) {
  if (cost.device_ns == 0) return;  // a view launches nothing
  const auto index = static_cast<size_t>(branch);
  clocks_[index][index] += 1;
  // The host has made the call already; a replay costs it nothing.
  const CallCost replayed{cost.device_ns, 0, cost.busy_ns};
  steps_.push_back({GraphStep::kLaunch, static_cast<uint8_t>(branch), signature, replayed});
}

void RecordedGraph::recorded(int branch, EventState& event) {
  event.place = static_cast<uint32_t>(event_clocks_.size());
  event_clocks_.push_back(clocks_[static_cast<size_t>(branch)]);
  steps_.push_back({GraphStep::kRecord, static_cast<uint8_t>(branch), event.place, 0});
}

void RecordedGraph::merge(int branch, const Clock& other) {
  Clock& clock = clocks_[static_cast<size_t>(branch)];
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void RecordedGraph::waited(int branch, const EventState& event) {
  merge(branch, event_clocks_[event.place]);
  steps_.push_back({GraphStep::kWait, static_cast<uint8_t>(branch), event.place, 0});
}

void RecordedGraph::called(int branch, uint32_t call, CallKind kind, uint32_t joins) {
  const auto index = static_cast<size_t>(branch);
  if (kind == CallKind::kBeside) apart_[call] = {clocks_[index]};
  if (kind == CallKind::kJoin) {
    apart_[joins].is_joined = true;
    merge(branch, apart_[joins].clock);
  }
  if (kind == CallKind::kInOrder || kind == CallKind::kJoin) clocks_[index][index] += 1;
  device_calls_ += kind == CallKind::kInOrder || kind == CallKind::kBeside;
  steps_.push_back({GraphStep::kCall, static_cast<uint8_t>(branch), call, {}});
}

CapturePoint RecordedGraph::point(int branch) const {
  const Clock& clock = clocks_[static_cast<size_t>(branch)];
  const bool comes_first = std::ranges::all_of(clock, [](uint32_t n) { return n == 0; });
  return comes_first ? CapturePoint() : CapturePoint(clock.begin(), clock.end());
}

bool RecordedGraph::is_joined() const {
  for (size_t i = 1; i < clocks_.size(); ++i) {
    if (clocks_[0][i] < clocks_[i][i]) return false;
  }
  return std::ranges::all_of(apart_, [](const auto& entry) { return entry.second.is_joined; });
}

std::string RecordedGraph::unjoined() const {
  std::string found;
  const auto add = [&found](const std::string& text) {
    found += (found.empty() ? "" : "; ") + text;
  };
  for (size_t i = 1; i < clocks_.size(); ++i) {
    if (clocks_[0][i] >= clocks_[i][i]) continue;
    const auto last = std::find_if(steps_.rbegin(), steps_.rend(), [i](const GraphStep& step) {
      return step.branch == i && step.kind == GraphStep::kLaunch;
    });
    const std::string text = last == steps_.rend() ? "" : signature_text(last->number);
    const uint32_t left = clocks_[i][i] - clocks_[0][i];
    add(std::to_string(left) +
        (left == 1 ? " kernel or communication" : " kernels or communications") +
        " of another stream" +
        (text.empty() ? "" : ", whose last kernel is " + text.substr(0, text.find('\x1f'))));
  }
  const auto apart = std::count_if(apart_.begin(), apart_.end(), [](const auto& entry) {
    return !entry.second.is_joined;
  });
  if (apart > 0) {
    add(std::to_string(apart) + (apart == 1 ? " communication" : " communications") +
        " that nobody waits for");
  }
  return found;
}

int64_t RecordedGraph::launches() const {
  const auto kernels = std::ranges::count(steps_, GraphStep::kLaunch, &GraphStep::kind);
  return kernels + device_calls_;
}

int64_t RecordedGraph::stream_of(int branch) const {
  return branch == 0 ? stream_ : kFirstBranchStream + branch - 1;
}

void RecordedGraph::begin_replay() {
  stream_ = current_stream(device);
  events_.assign(event_clocks_.size(), EventState());
  const int64_t host_ns = cost_of(signature_text(launch_signature())).host_ns;
  const int64_t start_ns = prismscale::device(device).launch_graph(
      stream_, launch_signature(), host_ns);
  record_op(launch_signature(), device, stream_, start_ns, 0);
}

int64_t RecordedGraph::replay(int64_t& stream) {
  Device& where = prismscale::device(device);
  if (next_ == 0) begin_replay();
  while (next_ < steps_.size()) {
    const GraphStep& step = steps_[next_++];
    stream = stream_of(step.branch);
    switch (step.kind) {
      case GraphStep::kLaunch: {
        const int64_t start_ns =
            where.launch_in_graph(stream, replayed_signature(step.number), step.cost);
        record_op(step.number, device, stream, start_ns, step.cost.device_ns, LaunchedBy::kGraph);
        break;
      }
      case GraphStep::kRecord:
        where.record(events_[step.number], stream);
        break;
      case GraphStep::kWait:
        where.wait(events_[step.number], stream);
        break;
      case GraphStep::kCall:
        return step.number;
    }
  }
  end_replay();
  return -1;
}

void RecordedGraph::end_replay() {
  prismscale::device(device).graph_launched(stream_);
  write_storages(*written);
  events_.clear();
  next_ = 0;
}

extern "C" {
#pragma GCC visibility push(default)

using Handle = std::shared_ptr<RecordedGraph>;

// Begins a capture on the device's stream; nullptr if one is under way already.
void* ps_graph_begin(int index, int64_t stream, int mode) {
  if (g_is_open) return nullptr;
  open() = std::make_shared<RecordedGraph>(index, stream, static_cast<CaptureMode>(mode));
  device(index).begin_capture(open(), stream);
  g_is_open = true;
  return new Handle(open());
}
// Ends the capture. Returns 0, or the error that cudaStreamEndCapture would return.
int ps_graph_end(void* handle) {
  RecordedGraph& graph = **static_cast<Handle*>(handle);
  if (!graph.is_open) return kCaptureInvalidated;
  g_is_open = false;
  graph.is_open = false;
  device(graph.device).end_capture();
  open().reset();
  close_written_storages(*graph.written, graph.id);
  if (graph.is_broken) return kCaptureInvalidated;
  return graph.is_joined() ? kSuccess : kCaptureUnjoined;
}
// Describes the work that has not been joined; empty if all has. The text is valid until the next
// call.
const char* ps_graph_unjoined(void* handle) {
  static auto* text = new std::string;
  *text = (*static_cast<Handle*>(handle))->unjoined();
  return text->c_str();
}
void ps_graph_delete(void* handle) { delete static_cast<Handle*>(handle); }
int64_t ps_graph_launches(void* handle) { return (*static_cast<Handle*>(handle))->launches(); }
int64_t ps_graph_replay(void* handle, int64_t* stream) {
  return (*static_cast<Handle*>(handle))->replay(*stream);
}
int ps_is_capturing(int index, int64_t stream) { return device(index).is_capturing(stream); }
// Records a call at the stream's present place; returns 0 if the stream is not capturing. A stream
// that joins a call becomes part of the capture. Marks on other streams go to the first branch.
int ps_graph_call(int index, int64_t stream, uint32_t call, int kind, uint32_t joins) {
  return device(index).called(stream, call, static_cast<CallKind>(kind), joins);
}

#pragma GCC visibility pop
}  // extern "C"

}  // namespace prismscale
