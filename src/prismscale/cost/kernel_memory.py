"""Kernels bound by memory: bytes over bandwidth, on top of the time of an empty kernel.

``base + bytes / (efficiency · bandwidth)`` is the usual saturation curve: half of the bandwidth is
reached where the two terms are equal. A broadcast operand comes from the caches, which costs about
half of what the bytes that it stands for would cost from memory.
"""

from __future__ import annotations

import math

from prismscale.cost.kernel_profile import KernelProfile, MemoryRoofline
from prismscale.cost.kernel_signature import KernelCall, TensorShape

# Tensors, blocks and elements of a block that one launch of ATen's multi_tensor_apply takes, by
# number of lists (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_BLOCKS_PER_LAUNCH = 320
_ELEMENTS_PER_BLOCK = 65_536
_CACHED_WIDTH = 4096
"""Elements of a row up to which torch's norms find it in a cache when they read it again."""


def memory_call_ns(profile: KernelProfile, call: KernelCall, kind: str) -> tuple[float, int]:
    """Device time of a call of ``kind``, and how many kernels it starts."""
    roofline = profile.memory[kind]
    launches = roofline.launches
    if call.is_library and "launches" in call.arguments:
        launches = call.arguments["launches"][0]
    elif kind in ("foreach", "foreach_reduction", "optimizer"):
        launches = _multi_tensor_launches(call)
    n_bytes = bytes_moved(call, kind) * roofline.passes + _of_rows(roofline, call)
    bandwidth = profile.memory_bandwidth_bytes_per_s * roofline.efficiency
    return launches * roofline.base_ns + 1e9 * n_bytes / bandwidth, launches


def _of_rows(roofline: MemoryRoofline, call: KernelCall) -> float:
    """Bytes that go with the rows of the first operand, and with their width."""
    if not call.inputs or not call.inputs[0].sizes or not (roofline.row_bytes + roofline.rereads):
        return 0.0
    first = call.inputs[0]
    width = max(1, first.sizes[-1])
    again = roofline.rereads * min(max(width / _CACHED_WIDTH - 1, 0), 1)
    return roofline.row_bytes * first.elements / width + again * first.n_bytes


def transfer_ns(profile: KernelProfile, call: KernelCall) -> float:
    """Time of a copy between host and device."""
    n_bytes = min((t.elements * t.item_bytes for t in call.inputs), default=0)
    roofline = profile.transfer
    return roofline.base_ns + 1e9 * n_bytes / roofline.bandwidth_bytes_per_s


def peer_ns(profile: KernelProfile, call: KernelCall) -> float:
    """Time of a kernel or copy that reads or writes memory of another GPU of the node."""
    n_bytes = max(t.n_bytes for t in (*call.inputs, *call.outputs) if t.on_peer)
    roofline = profile.peer or profile.transfer
    return roofline.base_ns + 1e9 * n_bytes / roofline.bandwidth_bytes_per_s


def bytes_moved(call: KernelCall, kind: str) -> int:
    """Bytes that a call reads and writes once; what inductor generates says how many."""
    if "traffic_bytes" in call.arguments:
        return call.arguments["traffic_bytes"][0]
    if call.is_library:
        stated = call.arguments.get("extents", ())
        return stated[0] if stated else sum(t.n_bytes for t in (*call.inputs, *call.outputs))
    written = sum(t.n_bytes for t in call.outputs)
    read = sum(t.n_bytes for t in _read(call, kind))
    if kind in ("foreach", "optimizer") and call.in_place and not call.outputs:
        return read + _written_in_place(call)
    if kind == "broadcast":
        read += _broadcast_bytes(call)
    return read + written


def _broadcast_bytes(call: KernelCall) -> int:
    """Half of the bytes that smaller operands stand for."""
    elements = max((t.elements for t in call.outputs), default=0)
    small = [t for t in call.inputs if 1 < t.elements < elements or t.n_bytes < t.elements]
    return sum(max(0, elements * t.item_bytes // 2 - t.n_bytes) for t in small)


def _read(call: KernelCall, kind: str) -> tuple[TensorShape, ...]:
    inputs = call.inputs
    if call.overload.endswith("out") and len(inputs) > len(call.outputs):
        inputs = inputs[: -len(call.outputs) or None]
    if kind == "fill":
        return ()
    if kind == "copy" and call.base == "copy":
        return inputs[1:2]
    if kind in ("embedding", "index") and not call.in_place:
        # A lookup reads what it returns, not the whole table.
        return (*inputs[1:], *call.outputs)
    if kind == "index":
        return inputs[1:]
    if kind == "embedding_backward":
        return inputs
    return inputs


def _lists(call: KernelCall) -> int:
    """How many tensor lists a foreach call takes; they arrive as one row of tensors."""
    if call.base.startswith("_fused_"):
        return 5 if len(call.inputs) % 5 == 0 else 4
    if "addc" in call.base:
        return 3
    if "lerp" in call.base:
        return 2
    return 2 if call.overload.startswith("List") or call.base == "_foreach_copy" else 1


def _written_in_place(call: KernelCall) -> int:
    """The optimizer writes parameters and two moments of (params, grads, moment, moment, step)."""
    lists = _lists(call)
    per_list = len(call.inputs) // lists
    first = sum(t.n_bytes for t in call.inputs[:per_list])
    if not call.base.startswith("_fused_"):
        return first
    moments = call.inputs[2 * per_list : 4 * per_list]
    return first + sum(t.n_bytes for t in moments)


def _multi_tensor_launches(call: KernelCall) -> int:
    lists = _lists(call)
    first = call.inputs[: max(1, len(call.inputs) // lists)]
    blocks = sum(math.ceil(t.elements / _ELEMENTS_PER_BLOCK) for t in first)
    by_tensors = math.ceil(len(first) / _TENSORS_PER_LAUNCH.get(lists, 30))
    return max(1, by_tensors, math.ceil(blocks / _BLOCKS_PER_LAUNCH))
