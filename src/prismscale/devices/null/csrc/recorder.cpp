// The record of executed ops: a row of 32 bytes for each, and a table of their signatures.
#include "recorder.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "capi.h"
#include "device.h"

namespace prismscale {
namespace {

std::atomic<bool> g_recording{false};
std::mutex g_mutex;

std::atomic<bool> g_counting{false};

std::vector<OpRow>& rows() {
  static auto* all = new std::vector<OpRow>();
  return *all;
}
struct Calls {
  int64_t all = 0;
  int64_t by_graphs = 0;
};
std::vector<Calls>& calls() {  // by signature
  static auto* all = new std::vector<Calls>();
  return *all;
}
std::deque<std::string>& signatures() {  // a deque: addresses of its strings stay valid
  static auto* all = new std::deque<std::string>{"(outside any op)"};
  return *all;
}

}  // namespace

uint32_t register_signature(std::string description) {
  std::lock_guard<std::mutex> lock(g_mutex);
  signatures().push_back(std::move(description));
  return static_cast<uint32_t>(signatures().size() - 1);
}

std::string signature_text(uint32_t id) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return signatures().at(id);
}

void record_op(uint32_t signature, int device, int64_t stream, int64_t start_ns,
               int64_t device_ns, LaunchedBy by) {
  if (start_ns == kCaptured) return;  // each replay records it
  if (g_counting.load(std::memory_order_relaxed) && !is_without_cost()) {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (signature >= calls().size()) calls().resize(signature + 1);
    calls()[signature].all += 1;
    calls()[signature].by_graphs += by == LaunchedBy::kGraph;
  }
  if (!g_recording.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  rows().push_back({signature, static_cast<uint16_t>(device), static_cast<uint16_t>(stream),
                    start_ns, device_ns, host_time_ns()});
}

extern "C" {
#pragma GCC visibility push(default)

void ps_record_ops(int on) { g_recording = on != 0; }

int64_t ps_op_rows() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return static_cast<int64_t>(rows().size());
}

// Copies at most `capacity` rows, oldest first, and forgets them; returns how many.
int64_t ps_drain_ops(OpRow* out, int64_t capacity) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto count = std::min(capacity, static_cast<int64_t>(rows().size()));
  std::copy_n(rows().begin(), count, out);
  rows().erase(rows().begin(), rows().begin() + count);
  return count;
}

void ps_count_calls(int on) { g_counting = on != 0; }

// Writes each signature's number of calls since the last time, and how many of them CUDA graphs
// made, for at most `capacity` signatures. Returns how many signatures.
int64_t ps_take_calls(int64_t* all, int64_t* by_graphs, int64_t capacity) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto count = std::min<int64_t>(capacity, static_cast<int64_t>(calls().size()));
  const auto end = calls().begin() + count;
  std::transform(calls().begin(), end, all, [](const Calls& c) { return c.all; });
  std::transform(calls().begin(), end, by_graphs, [](const Calls& c) { return c.by_graphs; });
  std::fill(calls().begin(), calls().end(), Calls{});
  return count;
}

int64_t ps_signature_count() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return static_cast<int64_t>(signatures().size());
}

const char* ps_signature(int64_t id) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return signatures().at(static_cast<size_t>(id)).c_str();
}

#pragma GCC visibility pop
}  // extern "C"

}  // namespace prismscale
