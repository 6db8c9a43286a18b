"""ctypes declarations of the extension's C interface (``csrc/capi.h``, ``csrc/capi.cpp``)."""

from __future__ import annotations

import ctypes
from ctypes import (
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

import numpy as np


class SettingsRow(ctypes.Structure):
    """Device and allocator settings; ``max_split_bytes`` 0 means unlimited."""

    _fields_ = (
        ("devices", c_int64),
        ("total_bytes", c_int64),
        ("outside_bytes", c_int64),
        ("blas_workspace_bytes", c_int64),
        ("max_split_bytes", c_int64),
        ("max_non_split_rounding_bytes", c_int64),
        ("large_segment_bytes", c_int64),
        ("expandable_segments", c_int64),
        ("graph_capture_record_stream_reuse", c_int64),
        ("multiprocessors", c_int64),
        ("roundup_power2_divisions", c_int64 * 16),
        ("garbage_collection_threshold", c_double),
        ("memory_fraction", c_double),
    )


class BlockRow(ctypes.Structure):
    """One block of the allocator, allocated or cached."""

    _fields_ = (
        ("address", c_uint64),
        ("size_bytes", c_int64),
        ("requested_bytes", c_int64),
        ("stream", c_int64),
        ("made_by", c_uint32),
        ("allocated", c_uint8),
        ("mapped", c_uint8),
        ("is_small", c_uint8),
        ("starts_segment", c_uint8),
        ("pool", c_uint64 * 2),
    )


OP_ROW = np.dtype(
    [
        ("signature", np.uint32),
        ("device", np.uint16),
        ("stream", np.uint16),
        ("start_ns", np.int64),
        ("device_ns", np.int64),
        ("issued_ns", np.int64),
    ]
)

SPAN_ROW = np.dtype(
    [
        ("duration_ns", np.int64),
        ("first_pred", np.int32),
        ("pred_count", np.int32),
        ("label", np.int32),
        ("lane", np.int16),
    ],
    align=True,
)

LAUNCH_ROW = np.dtype(
    [("signature", np.int32), ("lane", np.int16), ("is_stated", np.int16)], align=True
)

NODE_ROW = np.dtype(
    [
        ("position", np.int32),
        ("since", np.int32),
        ("first", np.int32),
        ("stop", np.int32),
        ("lane", np.int16),
        ("path", np.int16),
    ],
    align=True,
)

MEMORY_ROW = np.dtype(
    [
        ("address", np.uint64),
        ("bytes", np.int64),
        ("block_bytes", np.int64),
        ("time_ns", np.int64),
        ("made_by", np.uint32),
        ("origin", np.int32),
        ("label", np.int32),
        ("stream", np.int16),
        ("action", np.int16),
    ],
    align=True,
)

COST_CALLBACK = ctypes.CFUNCTYPE(None, c_char_p, *[ctypes.POINTER(c_int64)] * 3)
ORIGIN_CALLBACK = ctypes.CFUNCTYPE(c_int32, c_int64)
ANSWER_CALLBACK = ctypes.CFUNCTYPE(c_double, c_char_p, c_int, c_int64)

_IntPointer = ctypes.POINTER(c_int64)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ps_stats_words": (c_int64, ()),
    "ps_install": (None, (ctypes.POINTER(SettingsRow),)),
    "ps_set_capability": (None, (c_int, c_int)),
    "ps_set_cudnn": (None, (c_int64,)),
    "ps_set_cost": (None, (c_void_p, c_int64, c_int64)),
    "ps_set_answer": (None, (c_void_p,)),
    "ps_set_routing": (None, (ctypes.POINTER(c_double), c_int64, c_bool, c_double)),
    "ps_explain_faults": (None, ()),
    "ps_current_device": (c_int, ()),
    "ps_set_device": (None, (c_int,)),
    "ps_current_stream": (c_int64, (c_int,)),
    "ps_set_stream": (None, (c_int, c_int64)),
    "ps_host_time_ns": (c_int64, ()),
    "ps_advance_host": (None, (c_int64,)),
    "ps_communicates": (None, (c_int, c_int64)),
    "ps_host_waits_until": (None, (c_int64,)),
    "ps_stream_time_ns": (c_int64, (c_int, c_int64)),
    "ps_elapsed_ns": (c_int64, (c_void_p, c_void_p)),
    "ps_advance_stream": (None, (c_int, c_int64, c_int64)),
    "ps_launch": (c_int64, (c_int, c_int64, c_uint32, c_int64, c_int64, c_int64)),
    "ps_memory_stats": (None, (c_int, c_void_p)),
    "ps_take_peaks": (None, (c_int, _IntPointer, _IntPointer)),
    "ps_reset_peaks": (None, (c_int,)),
    "ps_reset_accumulated": (None, (c_int,)),
    "ps_empty_cache": (None, (c_int, c_uint64, c_uint64)),
    "ps_clear_blas": (None, ()),
    "ps_pool_retain": (c_int, (c_int, c_uint64, c_uint64)),
    "ps_pool_begin": (c_int, (c_int, c_uint64, c_uint64, c_int, c_int64)),
    "ps_pool_begin_capture": (c_int, (c_int, c_uint64, c_uint64)),
    "ps_pool_end": (c_int, (c_int, c_uint64, c_uint64)),
    "ps_pool_release": (c_int, (c_int, c_uint64, c_uint64)),
    "ps_pool_use_count": (c_int, (c_int, c_uint64, c_uint64)),
    "ps_pool_stats": (c_int64, (c_int, c_void_p, c_int64)),
    "ps_pool_options": (None, (c_int, c_uint64, c_uint64, c_int, c_int)),
    "ps_graph_begin": (c_void_p, (c_int, c_int64, c_int)),
    "ps_graph_end": (c_int, (c_void_p,)),
    "ps_graph_unjoined": (c_char_p, (c_void_p,)),
    "ps_graph_delete": (None, (c_void_p,)),
    "ps_graph_launches": (c_int64, (c_void_p,)),
    "ps_graph_replay": (c_int64, (c_void_p, _IntPointer)),
    "ps_graph_call": (c_int, (c_int, c_int64, c_uint32, c_int, c_uint32)),
    "ps_has_graph_states": (c_int, ()),
    "ps_is_capturing": (c_int, (c_int, c_int64)),
    "ps_free_bytes": (c_int64, (c_int,)),
    "ps_set_memory_fraction": (None, (c_int, c_double)),
    "ps_set_outside_bytes": (None, (c_int, c_int64)),
    "ps_note_out_of_memory": (None, (c_int,)),
    "ps_configure": (None, (ctypes.POINTER(SettingsRow),)),
    "ps_blocks": (c_int64, (c_int, ctypes.POINTER(BlockRow), c_int64)),
    "ps_oom_blocks": (c_int64, (c_int, ctypes.POINTER(BlockRow), c_int64)),
    "ps_set_origin": (None, (c_void_p, c_int64)),
    "ps_record_memory": (None, (c_int, c_int)),
    "ps_memory_rows": (c_int64, (c_int, c_void_p, c_int64)),
    "ps_raw_alloc": (c_void_p, (c_int, c_int64, c_int64)),
    "ps_raw_free": (None, (c_int, c_void_p)),
    "ps_resize_storage": (None, (c_void_p, c_int64)),
    "ps_without_cost": (None, (c_int,)),
    "ps_spans_begin": (None, ()),
    "ps_spans_label": (None, (c_int32, c_int32, c_int)),
    "ps_spans_close": (None, ()),
    "ps_spans_step_ended": (None, ()),
    "ps_set_launch_queue_depth": (None, (c_int64,)),
    "ps_spans_issued": (c_int64, (c_int, c_int64, c_int, c_void_p, c_int64)),
    "ps_spans_took": (None, (c_int32, c_int32, c_void_p, c_int64)),
    "ps_spans_joined": (None, (c_int, c_int64, c_void_p, c_int64, c_int)),
    "ps_spans_pending": (None, (_IntPointer, _IntPointer)),
    "ps_spans_drain": (None, (c_void_p, c_void_p)),
    "ps_log_sizes": (None, (_IntPointer, _IntPointer)),
    "ps_log_copy": (None, (c_void_p, c_void_p)),
    "ps_count_calls": (None, (c_int,)),
    "ps_take_calls": (c_int64, (c_void_p, c_void_p, c_int64)),
    "ps_record_ops": (None, (c_int,)),
    "ps_op_rows": (c_int64, ()),
    "ps_drain_ops": (c_int64, (c_void_p, c_int64)),
    "ps_signature_count": (c_int64, ()),
    "ps_signature": (c_char_p, (c_int64,)),
    "ps_replay_new": (c_void_p, (ctypes.POINTER(SettingsRow),)),
    "ps_replay_delete": (None, (c_void_p,)),
    "ps_replay_malloc": (c_void_p, (c_void_p, c_int64, c_int64)),
    "ps_replay_address": (c_uint64, (c_void_p,)),
    "ps_replay_free": (None, (c_void_p, c_void_p)),
    "ps_replay_record_stream": (None, (c_void_p, c_void_p, c_int64)),
    "ps_replay_synchronize": (None, (c_void_p,)),
    "ps_replay_empty_cache": (None, (c_void_p, c_uint64)),
    "ps_replay_begin_pool": (c_int, (c_void_p, c_uint64, c_int64)),
    "ps_replay_end_pool": (c_int, (c_void_p, c_uint64)),
    "ps_replay_captured_work": (None, (c_void_p, c_int64)),
    "ps_replay_captured_wait": (None, (c_void_p, c_int64, c_int64)),
    "ps_replay_release_pool": (c_int, (c_void_p, c_uint64)),
    "ps_replay_stats": (None, (c_void_p, c_void_p)),
}


def load(path: Path) -> ctypes.PyDLL:
    """Load the extension and declare its functions.

    PyDLL keeps the GIL: every function takes less time than releasing and taking it would.
    """
    library = ctypes.PyDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
