"""The record of executed ops, and the hook through which a kernel model times them.

Every distinct call (op, shapes, dtypes, strides, integer arguments) has one signature, described
once; an executed op is a 32-byte row that names its signature. A cost model is asked once for each
signature, not for each execution.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prismscale.devices.null.bindings import COST_CALLBACK, OP_ROW
from prismscale.devices.null.runtime import DEFAULT_DEVICE_NS, DEFAULT_HOST_NS, active

_FIELD = "\x1f"  # separates the fields of a description; see describe_call in csrc/signature.cpp


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """Shape and layout of one tensor; ``strides`` is None where it is contiguous."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    on_cpu: bool = False
    on_peer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSignature:
    """A distinct call. ``arguments`` holds integers, flags and integer lists by name."""

    name: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    arguments: dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One executed op: logical start and duration on its stream, and when the host issued it."""

    signature: OpSignature
    device: int
    stream: int
    start_ns: int
    device_ns: int
    issued_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpLog:
    """Drained ops, oldest first.

    ``rows_O`` is a structured array (``signature``, ``device``, ``stream``, ``start_ns``,
    ``device_ns``, ``issued_ns``); ``signatures`` maps the first column to what it means.
    """

    rows_O: npt.NDArray[np.void]
    signatures: dict[int, OpSignature]

    def __len__(self) -> int:
        return len(self.rows_O)

    def __iter__(self) -> Iterator[OpRecord]:
        for signature, device, stream, start_ns, device_ns, issued_ns in self.rows_O.tolist():
            yield OpRecord(
                signature=self.signatures[signature],
                device=device,
                stream=stream,
                start_ns=start_ns,
                device_ns=device_ns,
                issued_ns=issued_ns,
            )


CostModel = Callable[[OpSignature], tuple[int, int]]


def record_ops(on: bool = True) -> None:
    """Start or stop recording."""
    active().library.ps_record_ops(int(on))


def drain_ops() -> OpLog:
    """All ops recorded since the last drain."""
    library = active().library
    rows = np.zeros(library.ps_op_rows(), dtype=OP_ROW)
    count = library.ps_drain_ops(rows.ctypes.data, len(rows))
    rows = rows[:count]
    used = np.unique(rows["signature"]).tolist()
    return OpLog(rows_O=rows, signatures={number: _signature(number) for number in used})


def ops_of(run: Callable[[], object]) -> OpLog:
    """What ``run`` executes."""
    drain_ops()
    record_ops()
    run()
    record_ops(False)
    return drain_ops()


_installed: list[object] = []  # C++ holds a bare pointer to the callback: it must not be collected


def set_cost_model(model: CostModel | None) -> None:
    """Let ``model`` give ``(device_ns, host_ns)`` for every signature; None restores the defaults.

    Signatures that were seen already are costed anew. The model runs where a program meets a new
    signature, so it must be quick, and must not call torch.
    """
    library = active().library
    if model is None:
        library.ps_set_cost(None, DEFAULT_DEVICE_NS, DEFAULT_HOST_NS)
        _installed.clear()
        return

    def cost(
        description: bytes, device_ns: _IntPointer, host_ns: _IntPointer, _: _IntPointer
    ) -> None:
        device_ns[0], host_ns[0] = model(parse_signature(description.decode()))

    callback = COST_CALLBACK(cost)
    library.ps_set_cost(ctypes.cast(callback, ctypes.c_void_p), DEFAULT_DEVICE_NS, DEFAULT_HOST_NS)
    _installed[:] = [callback]


if TYPE_CHECKING:
    _IntPointer = ctypes._Pointer[ctypes.c_int64]


@cache
def _signature(number: int) -> OpSignature:
    return parse_signature(active().library.ps_signature(number).decode())


def parse_signature(description: str) -> OpSignature:
    """The signature that a description of ``csrc/signature.cpp`` stands for."""
    fields = description.split(_FIELD)
    if len(fields) != 4:
        return OpSignature(name=fields[0], inputs=(), outputs=(), arguments={})
    name, inputs, outputs, arguments = fields
    pairs = (item.partition("=") for item in arguments.split(";") if item)
    return OpSignature(
        name=name,
        inputs=_tensors(inputs),
        outputs=_tensors(outputs),
        arguments={key: _integers(values) for key, _, values in pairs},
    )


def _tensors(text: str) -> tuple[TensorMeta, ...]:
    return tuple(_tensor(item) for item in text.split(";") if item)


def _tensor(text: str) -> TensorMeta:
    layout, _, place = text.partition("!")
    contents, _, strides = layout.partition("@")
    dtype, _, shape = contents.rstrip("]").partition("[")
    return TensorMeta(
        dtype=dtype,
        shape=_integers(shape),
        strides=_integers(strides) if strides else None,
        on_cpu=place == "cpu",
        on_peer=place == "peer",
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
