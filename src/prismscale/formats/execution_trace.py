"""Reads PyTorch execution traces: JSON of ``torch.profiler.ExecutionTraceObserver``.

Schemas 1.0.1 (flat fields) and 1.0.2 … 1.1.1 (``inputs``/``outputs``/``attrs`` objects). Newer ones
add to the same form: 1.0.3 group descriptions, 1.0.4 compiled-kernel files, 1.1.0 what a collective
moves, 1.1.1 strides. An execution trace holds the operators of one rank, their nesting and their
tensors' shapes, but no times: those are in the Kineto trace of the same run, joined by ``rf_id``.
Source: ``torch/csrc/profiler/standalone/execution_trace_observer.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from prismscale.errors import FormatError
from prismscale.formats.json_stream import documents, members

SCHEMA = re.compile(r"(\d+)\.(\d+)\.(\d+)(-chakra\.[\d.]+)?")
OLDEST, NEWEST = (1, 0, 1), (1, 1, 1)
FLAT = (1, 0, 1)
"""The last schema whose nodes are flat."""
COMMUNICATION = "record_param_comms"


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedOp:
    """One operator call, or an annotation around some."""

    id: int
    name: str
    parent: int
    rf_id: int
    """Number of the call: ``Record function id`` of the Kineto trace."""
    tid: int
    op_schema: str
    inputs: tuple[Any, ...]
    input_shapes: tuple[Any, ...]
    input_types: tuple[str, ...]
    output_shapes: tuple[Any, ...]
    output_types: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that the node says, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCollective:
    """A communication call as an execution trace tells it."""

    op_id: int
    name: str
    """In the trace's words, for example ``all_to_allv`` or ``allreduce``."""
    group: str
    """Name of the process group; empty before schema 1.0.2."""
    group_size: int | None
    in_elements: int | None
    out_elements: int | None


@dataclass(frozen=True, kw_only=True)
class ExecutionTrace:
    """The operators of one rank."""

    schema: tuple[int, int, int]
    pid: int
    ops: tuple[TracedOp, ...]
    """By ascending id, which is the order in which calls began."""

    @cached_property
    def children(self) -> dict[int, list[TracedOp]]:
        """Calls made within each call, in order."""
        found: dict[int, list[TracedOp]] = {}
        for op in self.ops:
            # The root is its own parent.
            if op.parent != op.id:
                found.setdefault(op.parent, []).append(op)
        return found

    @property
    def leaves(self) -> list[TracedOp]:
        """Operators that call no other: what runs as kernels."""
        return [op for op in self.ops if op.op_schema and op.id not in self.children]

    def collectives(self) -> list[TracedCollective]:
        """Communication calls in order; waiting for one is no call."""
        found = (_collective(op) for op in self.ops if op.name == COMMUNICATION)
        return [c for c in found if c is not None and c.name != "wait"]


def read_execution_trace(path: Path) -> ExecutionTrace:
    """Read ``.json`` or ``.json.gz``, node by node.

    Raises:
        FormatError: damaged JSON, another schema, or a node that lacks what the schema demands.
    """
    traces = [_read(name, file) for name, file in documents(path)]
    if len(traces) != 1:
        raise FormatError(f"{path}: holds {len(traces)} traces; give one file")
    return traces[0]


def _read(name: str, file: Any) -> ExecutionTrace:
    schema: tuple[int, int, int] | None = None
    pid, ops = 0, []
    for key, value in members(name, file, "nodes"):
        if key == "schema":
            schema = _schema(name, value)
        elif key == "pid" and isinstance(value, int):
            pid = value
        elif key == "nodes":
            if schema is None:
                raise FormatError(f"{name}: nodes before the schema; not a PyTorch execution trace")
            ops.append(_op(name, schema, value))
    if schema is None:
        raise FormatError(f"{name}: no schema; not a PyTorch execution trace")
    ids = {op.id for op in ops}
    if len(ids) != len(ops):
        raise FormatError(f"{name}: a node id appears twice")
    orphan = next((op for op in ops if op.parent not in ids), None)
    if orphan is not None:
        raise FormatError(f"{name}: node {orphan.id} is within {orphan.parent}, which is missing")
    return ExecutionTrace(schema=schema, pid=pid, ops=tuple(sorted(ops, key=lambda op: op.id)))


def _schema(name: str, value: Any) -> tuple[int, int, int]:
    found = SCHEMA.fullmatch(str(value))
    version = (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)
    if not OLDEST <= version <= NEWEST:
        raise FormatError(f"{name}: schema {value!r}; 1.0.1 … 1.1.1 can be read")
    return version


def _op(name: str, schema: tuple[int, int, int], node: Any) -> TracedOp:
    try:
        return _flat(node) if schema <= FLAT else _nested(node)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = node.get("id") if isinstance(node, dict) else node
        version = ".".join(map(str, schema))
        raise FormatError(
            f"{name}: node {told!r} is not as schema {version} has it ({error!r})"
        ) from error


def _flat(node: Mapping[str, Any]) -> TracedOp:
    known = ("fw_parent", "seq_id", "scope", "fw_tid")
    return TracedOp(
        id=int(node["id"]),
        name=str(node["name"]),
        parent=int(node["parent"]),
        rf_id=int(node["rf_id"]),
        tid=int(node["tid"]),
        op_schema=str(node["op_schema"]),
        inputs=tuple(node["inputs"]),
        input_shapes=tuple(node["input_shapes"]),
        input_types=tuple(node["input_types"]),
        output_shapes=tuple(node["output_shapes"]),
        output_types=tuple(node["output_types"]),
        attrs={key: node[key] for key in known if key in node},
    )


def _nested(node: Mapping[str, Any]) -> TracedOp:
    attrs = {str(a["name"]): a["value"] for a in node["attrs"]}
    return TracedOp(
        id=int(node["id"]),
        name=str(node["name"]),
        parent=int(node["ctrl_deps"]),
        rf_id=int(attrs.pop("rf_id")),
        tid=int(attrs.pop("tid")),
        op_schema=str(attrs.pop("op_schema", "")),
        inputs=tuple(node["inputs"]["values"]),
        input_shapes=tuple(node["inputs"]["shapes"]),
        input_types=tuple(node["inputs"]["types"]),
        output_shapes=tuple(node["outputs"]["shapes"]),
        output_types=tuple(node["outputs"]["types"]),
        attrs=attrs,
    )


def _collective(op: TracedOp) -> TracedCollective | None:
    """From the attributes of schema 1.1.0 on; before that the name is among the inputs."""
    attrs = op.attrs
    name = attrs.get("collective_name")
    strings = [v for v, t in zip(op.inputs, op.input_types, strict=False) if t == "String"]
    if name is None:
        name = strings[-1] if strings else None
    if name is None:
        return None
    elements = [_elements(s) for s in op.input_shapes[:1]]
    outputs = [_elements(s) for s in op.output_shapes[:1]]
    return TracedCollective(
        op_id=op.id,
        name=str(name),
        group=str(attrs.get("pg_name", "")),
        group_size=_number(attrs.get("pg_size")),
        in_elements=_number(attrs.get("in_msg_nelems"), *elements),
        out_elements=_number(attrs.get("out_msg_nelems"), *outputs),
    )


def _number(*candidates: Any) -> int | None:
    return next((c for c in candidates if isinstance(c, int)), None)


def _elements(shape: Any) -> int | None:
    """Elements of a tensor's shape; None for what is no tensor."""
    if not isinstance(shape, list) or not shape or not all(isinstance(n, int) for n in shape):
        return None
    count = 1
    for n in shape:
        count *= n
    return count
