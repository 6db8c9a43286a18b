// CUDA graphs: what was launched while a stream was capturing, and how it is launched again.
//
// A capture begins on one stream and goes over to others by events. Its launches take no time; they
// are recorded as steps, each on a *branch* (the streams of the capture, in order of joining), with
// the events between branches. Replaying takes the host one launch. The first branch then runs on the
// stream that replays, each other one on a stream of its own beside those of the program, and the
// recorded events order them. So a graph takes the device as long as its launches would, issued
// again at once.
//
// Communications are calls into Python at their place between the steps: replaying stops there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device.h"

namespace prismscale {

// Of cudaError_t; raise_cuda throws torch.AcceleratorError with CUDA's words.
enum CudaError : int {
  kSuccess = 0,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCapturedEvent = 907,
};
[[noreturn]] void raise_cuda(CudaError error);

enum class CaptureMode : int { kGlobal, kThreadLocal, kRelaxed };

// How a call takes part in the order of its stream: a communication runs beside it until a join, a
// mark is no work of anybody's.
enum class CallKind : int { kInOrder, kBeside, kJoin, kMark };

struct GraphStep {
  enum Kind : uint8_t { kLaunch, kRecord, kWait, kCall } kind;
  uint8_t branch;
  uint32_t number;  // signature of a launch, else which event or call
  CallCost cost;    // of a launch
};

struct WrittenStorages;  // graph_values.cpp

class RecordedGraph {
 public:
  RecordedGraph(int device, int64_t stream, CaptureMode mode);

  const int device;
  const uint64_t id;  // from 1, as they are captured
  bool is_open = true;
  bool is_broken = false;  // by something that a capture does not allow
  const std::shared_ptr<WrittenStorages> written;

  // Whether calls that could disturb a capture are forbidden to this thread.
  bool forbids_here() const;

  // Under the device's lock, while the graph is open.
  int join();  // a stream's branch, or -1: no more can be kept apart
  void launched(int branch, uint32_t signature, const CallCost& cost);
  void recorded(int branch, EventState& event);
  void waited(int branch, const EventState& event);
  void called(int branch, uint32_t call, CallKind kind, uint32_t joins);
  CapturePoint point(int branch) const;  // empty while nothing comes before
  bool is_joined() const;  // all of its work has come back to the first branch
  std::string unjoined() const;  // which work has not, in words

  int64_t launches() const;
  // The number of the next call, and in `stream` where it is made; -1: the replay is over.
  int64_t replay(int64_t& stream);

 private:
  // How much of each branch comes before a point.
  using Clock = std::array<uint32_t, kGraphBranches>;
  struct Apart {
    Clock clock;
    bool is_joined = false;
  };
  void merge(int branch, const Clock& other);
  void begin_replay();
  void end_replay();
  int64_t stream_of(int branch) const;

  const CaptureMode mode_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::vector<GraphStep> steps_;
  std::vector<Clock> clocks_;        // of the branches
  std::vector<Clock> event_clocks_;  // of the events
  std::map<uint32_t, Apart> apart_;  // calls beside their stream
  // Of the replay under way.
  size_t next_ = 0;
  int64_t stream_ = 0;
  std::vector<EventState> events_;
};

// The graph that is being captured in this process, or nothing.
RecordedGraph* open_graph();
// Raises where such calls are forbidden now; the capture is lost.
void check_capture_allows();

// graph_values.cpp: values of what a graph writes are, after each replay, what its capture knew. That
// is what its kernels make of constants, of answers to questions (how many tokens an expert gets) and
// of what peers send of these; what is made of the graph's inputs is another at each replay.
std::shared_ptr<WrittenStorages> no_written_storages();
void close_written_storages(WrittenStorages& storages, uint64_t graph);
void write_storages(WrittenStorages& storages);

}  // namespace prismscale
