"""Replacement of ``torch._C._CUDAGraph``, the base class of ``torch.cuda.CUDAGraph``.

Rules and error messages are those of torch's ``CUDAGraph.cpp``.
"""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from prismscale.devices.null.graphs.graph_recording import MODES, GraphRecording
from prismscale.devices.null.graphs.mem_pools import PoolId, own_pool_id, succeed


class RandomWords:
    """Device memory from which replays read the random seed and offset of a device's graphs.

    It is two tensors of one number each, from the ordinary pool. They live as long as any graph of
    the device does.
    """

    _of_device: ClassVar[WeakValueDictionary[int, RandomWords]] = WeakValueDictionary()

    def __init__(self, device: int) -> None:
        place = torch.device("cuda", device)
        self.words = [torch.empty(1, dtype=torch.int64, device=place) for _ in range(2)]

    @classmethod
    def of(cls, device: int) -> RandomWords:
        """Return the words of ``device``; allocate them if it has none."""
        found = cls._of_device.get(device)
        if found is None:
            found = cls._of_device[device] = cls(device)
        return found


class _Resources:
    """A graph and its holds on pools; released when the program drops or resets the graph."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self.recording: GraphRecording | None = None
        self.random: RandomWords | None = None
        self.pools: list[tuple[int, PoolId]] = []
        """Device and id of each pool that the graph holds; the one of its capture comes first."""

    def release(self) -> None:
        """Destroy the graph and drop its holds on pools."""
        if self.recording is not None:
            self.recording.delete()
            self.recording = None
        self.random = None
        pools, self.pools = self.pools, []
        for device, pool in pools:
            self._library.ps_pool_release(device, *pool)

    def __del__(self) -> None:
        self.release()


class NullGraph:
    """A CUDA graph: its capture and its replays.

    ``library`` is set when the null device is activated.
    """

    library: ClassVar[ctypes.PyDLL]
    capturing: ClassVar[NullGraph | None] = None
    n_captured: ClassVar[int] = 0

    def __init__(self, keep_graph: bool = False) -> None:
        self._held = _Resources(self.library)
        self._keeps_template = keep_graph
        self._is_captured = self._is_instantiated = False

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Begin to record launches on the current stream and on streams that wait for it."""
        _check(
            not self._is_captured,
            "This CUDAGraph instance already owns a captured graph. To capture a new graph, "
            "create a new instance.",
        )
        device = int(self.library.ps_current_device())
        _check(
            self.library.ps_current_stream(device) != 0,
            "CUDA graphs must be captured on a non-default stream. (However, after capture, it's "
            "ok to replay them on the default stream.)",
        )
        _check(
            capture_error_mode in MODES,
            "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got "
            f"{capture_error_mode}",
        )
        pool_id = own_pool_id() if pool is None or not any(pool) else (pool[0], pool[1])
        self._held.release()  # a failed capture may have left resources
        self._held.random = RandomWords.of(device)
        self._held.recording = GraphRecording(self.library, capture_error_mode)
        begun = self.library.ps_pool_begin_capture(device, *pool_id)
        if not begun:
            self._held.recording.end()
            self._held.release()
            succeed(begun, "beginAllocateToPool", pool_id)
        self._held.pools.append((device, pool_id))
        NullGraph.capturing = self

    def capture_end(self) -> None:
        """End the capture. The graph can be replayed from here on."""
        self.capture_end_pre()
        if not self._keeps_template:
            NullGraph.instantiate(self)
        self.capture_end_post()

    def capture_end_pre(self) -> None:
        """End the capture; raises the CUDA error with which it ends."""
        recording = self._held.recording
        if recording is None or NullGraph.capturing is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        device, pool = self._held.pools[0]
        _check(
            self.library.ps_current_stream(device) == recording.stream,
            "Capture must end on the same stream it began on.",
        )
        NullGraph.capturing = None
        error = recording.end()
        self.library.ps_pool_end(device, *pool)
        if error:
            _raise_cuda(error, recording.unjoined)
        self._is_captured = True
        NullGraph.n_captured += 1
        if recording.n_launches == 0:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be "
                "captured on wrong device or stream.",
                stacklevel=2,
            )

    def capture_end_post(self) -> None:
        """Do nothing: nothing is left to do."""

    def instantiate(self) -> None:
        """Make the graph ready for replays."""
        _check(self._is_captured, "capture_end() must have been called before calling instantiate")
        self._is_instantiated = True

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        recording = self._held.recording
        if recording is None or not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        _check(
            NullGraph.capturing is None,
            "Cannot prepare for replay during capturing stage. during CUDA graph capture. If you "
            "need this call to be captured, please file an issue. Current "
            "cudaStreamCaptureStatus: cudaStreamCaptureStatusActive",
        )
        self._is_instantiated = True
        with torch.cuda.device(recording.device):
            recording.replay()

    def reset(self) -> None:
        """Delete the graph; this object may capture another."""
        if NullGraph.capturing is self:
            NullGraph.capturing = None
            assert self._held.recording is not None
            self._held.recording.end()
            device, pool = self._held.pools[0]
            self.library.ps_pool_end(device, *pool)
        self._held.release()
        self._is_captured = self._is_instantiated = False

    def pool(self) -> PoolId:
        """Return the id of the graph's pool, which other graphs may share."""
        _check(
            self._is_captured, "Called CUDAGraph::pool() without a preceding successful capture."
        )
        return self._held.pools[0][1]

    def pools(self) -> list[PoolId]:
        """Return the ids of the graph's pool and of further pools that its capture used."""
        _check(
            self._is_captured, "Called CUDAGraph::pools() without a preceding successful capture."
        )
        return [pool for _, pool in self._held.pools]

    def _retain_pool(self, pool: PoolId) -> None:
        _check(
            NullGraph.capturing is self, "CUDAGraph::retain_pool may only be called during capture."
        )
        device = self._held.pools[0][0]
        if (device, pool) not in self._held.pools:
            succeed(self.library.ps_pool_retain(device, *pool), "retain_pool", pool)
            self._held.pools.append((device, pool))

    @staticmethod
    def get_currently_capturing_graph() -> NullGraph:
        """Return the graph whose capture is under way; raises RuntimeError if there is none."""
        if NullGraph.capturing is None:
            raise RuntimeError("The current stream is not currently capturing.")
        return NullGraph.capturing

    @property
    def _has_graph_exec(self) -> bool:
        return self._is_instantiated

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Do nothing: random numbers have no values here, whichever generator makes them."""

    def enable_debug_mode(self) -> None:
        """Keep the graph's template, which :meth:`debug_dump` shows."""
        self._keeps_template = True

    def debug_dump(self, debug_path: str) -> None:
        """Write a DOT file with a single node that gives the number of launches."""
        recording = self._held.recording
        n_launches = 0 if recording is None else recording.n_launches
        Path(debug_path).write_text(
            f'digraph dot {{\n  graph_0 [label="{n_launches} launches"];\n}}\n', encoding="utf-8"
        )

    def raw_cuda_graph(self) -> int:
        """Return a number in place of the graph's handle; no CUDA library knows it."""
        _check(
            self._keeps_template and self._is_captured,
            "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with "
            "keep_graph=true",
        )
        return id(self)

    def raw_cuda_graph_exec(self) -> int:
        """Return a number in place of the executable graph's handle; no CUDA library knows it."""
        _check(
            self._is_instantiated,
            "You cannot access the raw cudaGraphExec_t instance until instantiate() has been "
            "called",
        )
        return id(self)

    def begin_capture_to_if_node(self, *_: Any) -> None:
        """Raise NotImplementedError: the value of a condition on the device is not known here."""
        raise NotImplementedError(
            "conditional nodes of CUDA graphs depend on values of the device, which the null "
            "device does not have"
        )

    begin_capture_to_while_node = begin_capture_to_if_node


def _raise_cuda(error: int, unjoined: str) -> None:
    """Raise the error with which CUDA ends a capture, with a note on the unjoined work.

    CUDA's own message does not say which work that is.
    """
    ops: Any = torch.ops.prismscale_null
    try:
        ops.raise_cuda(error)
    except RuntimeError as raised:
        if unjoined:
            raised.add_note(f"Not joined to the stream that captures: {unjoined}")
        raise


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
