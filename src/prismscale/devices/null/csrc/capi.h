// Plain structures that Python reads through ctypes; their layout is repeated in bindings.py.
#pragma once

#include <cstdint>

extern "C" {

struct OpRow {
  uint32_t signature;
  uint16_t device, stream;
  int64_t start_ns, device_ns, issued_ns;
};

struct BlockRow {
  uint64_t address;
  int64_t size_bytes, requested_bytes, stream;
  uint32_t made_by;
  uint8_t allocated, mapped, is_small, starts_segment;
  uint64_t pool[2];  // id of its private pool; zeros where it has none
};

// Predecessors: `pred_count` positions from `first_pred` on in the array drained with the rows.
struct SpanRow {
  int64_t duration_ns;
  int32_t first_pred, pred_count, label;
  int16_t lane;  // 0 is the host; streams count from 1 in order of first use
};

// What cost time, in program order: a call on a lane of the span graph. A *stated* row has nanoseconds
// in place of a signature: what a kernel waited for those of other streams, or (lane -1) the host's
// own work.
enum RowKind : int16_t { kCosted, kStated };
struct LaunchRow {
  int32_t signature;
  int16_t lane;
  RowKind kind;
};

// The launches that a node of the span graph is made of: rows `first` to `stop` of its lane. A launch
// path also counts what the host did from row `since` on.
struct NodeRow {
  int32_t position, since, first, stop;
  int16_t lane, path;  // path: see `Path` in spans.h
};

// One event in the memory of a device; `action` is a MemoryAction.
struct MemoryRow {
  uint64_t address;
  int64_t bytes, block_bytes, time_ns;  // as asked for; as taken
  uint32_t made_by;  // signature of the op that allocates
  int32_t origin;    // see memory_history.h
  int32_t label;     // of the span graph: what the program is doing
  int16_t stream, action;
};

struct SettingsRow {
  int64_t devices, total_bytes, outside_bytes, blas_workspace_bytes;
  int64_t max_split_bytes, max_non_split_rounding_bytes, large_segment_bytes;
  int64_t expandable_segments, graph_capture_record_stream_reuse, multiprocessors;
  int64_t roundup_power2_divisions[16];
  double garbage_collection_threshold, memory_fraction;
};

}
