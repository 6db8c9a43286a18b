"""Time model of memory-bound kernels: bytes over bandwidth, plus the time of an empty kernel.

``base + bytes / (efficiency · bandwidth)`` is the usual saturation curve: half of the bandwidth is
reached where the two terms are equal. Operands that fit into the L2 cache together come from there,
because the kernel before has just written or read them. A kernel that loads one element at a time
is limited by its number of elements.
"""

from __future__ import annotations

import math

import numpy as np

from prismscale.cost.kernel_profile import Cache, KernelProfile, MemoryRoofline
from prismscale.cost.kernel_signature import KernelCall, TensorShape
from prismscale.cost.kernel_tiles import bend

ELEMENT_SHARPNESS = 3.0
"""Sharpness of the bend from a limit by bytes to one by elements."""
CACHE_HOLDS, CACHE_LOSES = 0.55, 0.9
"""Bytes as shares of the cache: up to the first all operands are in the cache, from the second on
all come from memory."""
_CACHED_WIDTH = 4096
"""Longest row, in elements, that torch's norms find in a cache when they read it again."""
_INDEX_LAUNCHES = {"nonzero": 8, "bincount": 14, "histc": 16}
"""Launches of operators that count, or look for the maximum, before they write."""
_ADDS = ("index_add", "index_reduce", "scatter_add", "scatter_reduce")
"""Scatters that combine what they write with their target."""
_SORTED_LAUNCHES = 15
"""Launches of a scatter that adds: it sorts its indices to add in their order."""
_SCALAR_LAUNCHES = 4
"""Launches of a scatter that writes a number from the host: the number is copied to the device
first."""
# Tensors (by number of lists), blocks, and elements per block that one launch of ATen's
# multi_tensor_apply takes (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_BLOCKS_PER_LAUNCH = 320
_ELEMENTS_PER_BLOCK = 65_536


def memory_call_ns(profile: KernelProfile, call: KernelCall, kind: str) -> tuple[float, int]:
    """Return the device time in ns of a call of ``kind``, and the number of kernels it launches."""
    roofline = profile.memory[kind]
    launches = _launches(roofline, call, kind)
    moved = bytes_moved(call, kind) * roofline.passes
    n_bytes = moved * _uncached(profile.cache, moved) + _of_rows(roofline, call)
    bandwidth = profile.memory_bandwidth_bytes_per_s * _efficiency(roofline, call)
    seconds = n_bytes / bandwidth
    if roofline.elements_per_s and _loads_elements(call, kind):
        elements = max((t.elements for t in (*call.inputs, *call.outputs)), default=0)
        if elements:
            loading = np.array([elements / roofline.elements_per_s])
            seconds = float(bend((np.array([seconds]), loading), ELEMENT_SHARPNESS)[0])
    return launches * roofline.base_ns + 1e9 * seconds, launches


def transfer_ns(profile: KernelProfile, call: KernelCall) -> float:
    """Return the time of a copy between host and device."""
    n_bytes = min((t.elements * t.item_bytes for t in call.inputs), default=0)
    roofline = profile.transfer
    return roofline.base_ns + 1e9 * n_bytes / roofline.bandwidth_bytes_per_s


def peer_ns(profile: KernelProfile, call: KernelCall) -> float:
    """Return the time of a kernel or copy that accesses memory of another GPU of the node."""
    n_bytes = max(t.n_bytes for t in (*call.inputs, *call.outputs) if t.on_peer)
    roofline = profile.peer or profile.transfer
    return roofline.base_ns + 1e9 * n_bytes / roofline.bandwidth_bytes_per_s


def _launches(roofline: MemoryRoofline, call: KernelCall, kind: str) -> int:
    if call.is_library and "launches" in call.arguments:
        return call.arguments["launches"][0]
    if kind in ("foreach", "foreach_reduction", "optimizer"):
        return _multi_tensor_launches(call)
    if kind != "index":
        return roofline.launches
    if call.flag("accumulate"):
        return _SORTED_LAUNCHES
    if call.in_place and any(t.on_cpu for t in call.inputs):
        return _SCALAR_LAUNCHES
    return _INDEX_LAUNCHES.get(call.base, roofline.launches)


def _uncached(cache: Cache | None, n_bytes: float) -> float:
    """Return the cost of a byte relative to one from memory, in a call that moves ``n_bytes``."""
    if cache is None:
        return 1.0
    held = (CACHE_LOSES - n_bytes / cache.bytes) / (CACHE_LOSES - CACHE_HOLDS)
    held = min(max(held, 0.0), 1.0)
    return 1 - held + held / cache.speed


def _of_rows(roofline: MemoryRoofline, call: KernelCall) -> float:
    """Return the further bytes that the rows of the first operand cost, by number and width."""
    if not call.inputs or not call.inputs[0].sizes or not (roofline.row_bytes + roofline.rereads):
        return 0.0
    first = call.inputs[0]
    width = max(1, first.sizes[-1])
    again = roofline.rereads * min(max(width / _CACHED_WIDTH - 1, 0), 1)
    return roofline.row_bytes * first.elements / width + again * first.n_bytes


def _efficiency(roofline: MemoryRoofline, call: KernelCall) -> float:
    efficiency = roofline.efficiency
    if _is_transposed(call):
        efficiency *= roofline.transposed
    if _adds_to_its_target(call):
        efficiency *= roofline.accumulating
    return efficiency


def _is_transposed(call: KernelCall) -> bool:
    """Return whether neighbours in the result are not neighbours in a large operand."""
    if not call.outputs or call.is_library:
        return False
    inner = _inner_dim(call.outputs[0])
    large = (t for t in call.inputs if 2 * t.elements >= call.outputs[0].elements)
    return any(_inner_dim(t) not in (None, inner) for t in large if inner is not None)


def _inner_dim(tensor: TensorShape) -> int | None:
    """Return the dimension, counted from the last as 1, along which memory is contiguous."""
    strides = tensor.strides
    for back, size in enumerate(reversed(tensor.sizes), start=1):
        if size > 1 and (strides is None or strides[-back] == 1):
            return back
    return None


def _loads_elements(call: KernelCall, kind: str) -> bool:
    """Return whether ATen's kernel loads one element at a time instead of vectors.

    It does so where operands differ in shape, layout or element type, and in copies into a wider
    type. Libraries and inductor load vectors and convert them.
    """
    if call.is_library:
        return False
    if kind in ("broadcast", "strided_copy"):
        return True
    if kind == "copy":
        return call.base == "copy" and _widens(call)
    floats = {t.dtype for t in call.inputs if t.elements > 1 and not t.on_cpu and t.dtype != "Bool"}
    return kind == "pointwise" and len(floats) > 1


def _widens(call: KernelCall) -> bool:
    return len(call.inputs) > 1 and call.inputs[0].item_bytes > call.inputs[1].item_bytes


def bytes_moved(call: KernelCall, kind: str) -> int:
    """Return the bytes that a call reads and writes once; inductor's kernels state theirs."""
    if "traffic_bytes" in call.arguments:
        return call.arguments["traffic_bytes"][0]
    if call.is_library:
        stated = call.arguments.get("extents", ())
        return stated[0] if stated else sum(t.n_bytes for t in (*call.inputs, *call.outputs))
    if kind == "index" and call.in_place:
        return _scattered(call)
    written = sum(t.n_bytes for t in call.outputs)
    read = sum(t.n_bytes for t in _read(call, kind))
    if kind in ("foreach", "optimizer") and call.in_place and not call.outputs:
        return read + _written_in_place(call)
    return read + written


def _adds_to_its_target(call: KernelCall) -> bool:
    """Return whether a scatter adds to its target, so that equal indices wait for each other."""
    return call.flag("accumulate") or call.base in _ADDS


def _multi_tensor_launches(call: KernelCall) -> int:
    """Return the number of kernels that a call over lists of tensors is split into."""
    lists = _lists(call)
    first = call.inputs[: max(1, len(call.inputs) // lists)]
    blocks = sum(math.ceil(t.elements / _ELEMENTS_PER_BLOCK) for t in first)
    by_tensors = math.ceil(len(first) / _TENSORS_PER_LAUNCH.get(lists, 30))
    return max(1, by_tensors, math.ceil(blocks / _BLOCKS_PER_LAUNCH))


def _read(call: KernelCall, kind: str) -> tuple[TensorShape, ...]:
    inputs = call.inputs
    if call.overload.endswith("out") and len(inputs) > len(call.outputs):
        inputs = inputs[: -len(call.outputs) or None]
    if kind == "fill" or call.base == "_foreach_zero":
        return ()
    if kind == "copy" and call.base == "copy":
        return inputs[1:2]
    if kind in ("embedding", "index"):
        # A lookup reads what it returns, not the whole table.
        return (*inputs[1:], *call.outputs)
    if call.base.startswith("nll_loss"):
        # A loss reads one number of each row of the input; its gradient needs only the shape.
        return inputs[2:] if "backward" in call.base else inputs[1:]
    return inputs


def _scattered(call: KernelCall) -> int:
    """Return the bytes of indices, values, and the elements of the target that are written."""
    target, *rest = call.inputs
    positions = [t for t in rest if t.dtype in ("Long", "Int", "Bool")]
    values = rest[-1] if rest else target
    rows = max((t.elements for t in positions), default=0)
    elements = values.elements
    if call.base in ("index_put", "_index_put_impl", "_unsafe_index_put"):
        elements = max(elements, rows * math.prod(target.sizes[len(positions) :]))
    return sum(t.n_bytes for t in rest) + elements * target.item_bytes


def _lists(call: KernelCall) -> int:
    """Return the number of tensor lists of a foreach call; they arrive as one row of tensors."""
    if call.base.startswith("_fused_"):
        return 5 if len(call.inputs) % 5 == 0 else 4
    if "addc" in call.base:
        return 3
    if "lerp" in call.base:
        return 2
    return 2 if call.overload.startswith("List") or call.base == "_foreach_copy" else 1


def _written_in_place(call: KernelCall) -> int:
    """Return the bytes written to the first list, and by an optimizer also to its two moments.

    An optimizer's lists are (params, grads, moment, moment, step).
    """
    lists = _lists(call)
    per_list = len(call.inputs) // lists
    first = sum(t.n_bytes for t in call.inputs[:per_list])
    if not call.base.startswith("_fused_"):
        return first
    moments = call.inputs[2 * per_list : 4 * per_list]
    return first + sum(t.n_bytes for t in moments)
