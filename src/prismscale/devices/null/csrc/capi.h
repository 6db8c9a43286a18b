// Plain structures that Python reads through ctypes. bindings.py repeats their layout.
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
  uint64_t pool[2];  // id of its private pool; zeros if it has none
};

// One node of the span graph. Its predecessors are the `pred_count` positions from index
// `first_pred` on in the array that is drained with the rows.
struct SpanRow {
  int64_t duration_ns;
  int32_t first_pred, pred_count, label;
  int16_t lane;  // 0 is the host; streams count from 1 in order of first use
};

// One thing that cost time, in program order: a launch on a lane of the span graph, or a *stated*
// row, which has nanoseconds in place of a signature: the wait of a lane's kernel for kernels of
// other streams, or (lane -1) work of the host alone.
enum RowKind : int16_t { kCosted, kStated };
struct LaunchRow {
  int32_t signature;
  int16_t lane;
  RowKind kind;
};

// The launches behind a node of the span graph: the rows of its lane from `first` to before `stop`.
// A launch path also counts the host's time for all rows from `since` on.
struct NodeRow {
  int32_t position, since, first, stop;
  int16_t lane, path;  // path: see `Path` in spans.h
};

// One event in the memory of a device; `action` is a MemoryAction.
struct MemoryRow {
  uint64_t address;
  int64_t bytes, block_bytes, time_ns;  // bytes as requested; size of the block
  uint32_t made_by;  // signature of the op that allocates
  int32_t origin;    // see memory_history.h
  int32_t label;     // of the span graph: the program's current phase
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
