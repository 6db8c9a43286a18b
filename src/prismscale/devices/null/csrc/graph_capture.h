// CUDA graphs: how the launches of a capture are recorded and replayed.
//
// A capture begins on one stream and spreads to others by events. Its launches take no device time.
// They are recorded as steps, together with the events between streams. Each stream of a capture is
// a *branch*; branches are numbered in the order in which they join. A replay costs the host one
// launch. The first branch then runs on the stream that replays, each other branch on a stream of
// its own that the program does not use, and the recorded events order them. So a graph takes the
// device as long as its launches would if they were all issued at once.
//
// Communications are recorded as calls into Python between the steps. A replay stops at each call
// and returns to Python, which makes it.
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

// Values of cudaError_t. raise_cuda() throws torch.AcceleratorError with CUDA's message.
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

// How a call is ordered on its stream. kInOrder: like a kernel. kBeside: a communication that runs
// beside the stream until its kJoin. kMark: no device work at all.
enum class CallKind : int { kInOrder, kBeside, kJoin, kMark };

struct GraphStep {
  enum Kind : uint8_t { kLaunch, kRecord, kWait, kCall } kind;
  uint8_t branch;
  uint32_t number;  // signature of a launch, else the number of the event or call
  CallCost cost;    // of a launch
};

struct WrittenStorages;  // graph_values.cpp

class RecordedGraph {
 public:
  RecordedGraph(int device, int64_t stream, CaptureMode mode);

  const int device;
  const uint64_t id;  // counts captures from 1
  bool is_open = true;
  bool is_broken = false;  // the program did something that a capture does not allow
  const std::shared_ptr<WrittenStorages> written;

  // Whether the mode forbids this thread calls that could disturb a capture.
  bool forbids_here() const;

  // Called under the device's lock, while the graph is open.
  int join();  // adds a branch and returns it; -1: there are kGraphBranches of them
  void launched(int branch, uint32_t signature, const CallCost& cost);
  void recorded(int branch, EventState& event);
  void waited(int branch, const EventState& event);
  void called(int branch, uint32_t call, CallKind kind, uint32_t joins);
  CapturePoint point(int branch) const;  // empty while nothing comes before
  bool is_joined() const;  // whether all work has been joined to the first branch
  std::string unjoined() const;  // describes the work that has not been joined

  int64_t launches() const;
  // Replays up to the next call. Returns its number and stores its stream; -1: the replay is over.
  int64_t replay(int64_t& stream);

 private:
  // For each branch, how many of its launches and calls come before a point.
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
  int64_t device_calls_ = 0;  // calls that are work of the device
  std::vector<Clock> clocks_;        // of the branches
  std::vector<Clock> event_clocks_;  // of the events
  std::map<uint32_t, Apart> apart_;  // kBeside calls, by number
  // State of the replay under way.
  size_t next_ = 0;
  int64_t stream_ = 0;
  std::vector<EventState> events_;
};

// The graph under capture in this process, or nullptr.
RecordedGraph* open_graph();
// If forbids_here(), breaks the capture and raises.
void check_capture_allows();

// graph_values.cpp: after each replay, the storages that a graph writes have the values that its
// capture knew. Those are computed from constants, from answers to questions (how many tokens an
// expert gets) and from what peers send of these. What is computed from the graph's inputs differs
// at each replay, unless the inputs are what they were.
std::shared_ptr<WrittenStorages> no_written_storages();
void close_written_storages(WrittenStorages& storages, uint64_t graph);
void write_storages(WrittenStorages& storages);

}  // namespace prismscale
