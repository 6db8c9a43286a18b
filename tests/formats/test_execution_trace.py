"""PyTorch execution traces of every schema from 1.0.1 to 1.1.1."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from prismscale.errors import FormatError
from prismscale.formats.execution_trace import read_execution_trace

ROOT = "[pytorch|profiler|execution_trace|process]"


def flat(id: int, name: str, parent: int, **more: Any) -> dict[str, Any]:
    base = {"id": id, "name": name, "parent": parent, "rf_id": id, "tid": 1, "op_schema": name}
    shapes = {f"{side}_{what}": [] for side in ("input", "output") for what in ("shapes", "types")}
    return base | {"inputs": [], "outputs": [], "seq_id": -1} | shapes | more


def nested(id: int, name: str, parent: int, **attrs: Any) -> dict[str, Any]:
    told = {"rf_id": id, "tid": 1, "op_schema": name} | attrs
    tensors = {"values": [[1, 2, 0, 6, 4, "cpu"]], "shapes": [[2, 3]], "types": ["Tensor(float)"]}
    return {
        "id": id,
        "name": name,
        "ctrl_deps": parent,
        "inputs": tensors | {"strides": [[3, 1]]},
        "outputs": tensors,
        "attrs": [{"name": k, "type": "?", "value": v} for k, v in told.items()],
    }


def write(path: Path, schema: str, nodes: list[dict[str, Any]]) -> Path:
    text = json.dumps({"schema": schema, "pid": 7, "time": "now", "nodes": nodes})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


NEW_SCHEMAS = [f"{v}-chakra.0.0.4" for v in ("1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")]


@pytest.mark.parametrize("schema", [*NEW_SCHEMAS, "1.1.1-chakra.1.0.0"])
def test_nested_schemas_are_read(tmp_path: Path, schema: str) -> None:
    """Operators, their nesting and shapes; leaves are what calls no other."""
    nodes = [nested(1, ROOT, 1, op_schema=""), nested(2, "aten::mm", 1), nested(3, "aten::t", 2)]
    trace = read_execution_trace(write(tmp_path / "et.json", schema, nodes))
    assert [op.name for op in trace.leaves] == ["aten::t"]
    assert trace.ops[1].input_shapes == ([2, 3],)
    assert ".".join(map(str, trace.schema)) == schema.split("-")[0]


def test_flat_schema_is_read_in_order_of_calls(tmp_path: Path) -> None:
    """1.0.1 writes a call when it ends; we list calls as they began."""
    nodes = [flat(3, "aten::t", 2), flat(2, "aten::mm", 1), flat(1, ROOT, 1, op_schema="")]
    trace = read_execution_trace(write(tmp_path / "et.json.gz", "1.0.1", nodes))
    assert [op.id for op in trace.ops] == [1, 2, 3]
    assert [op.id for op in trace.children[1]] == [2]


def test_collectives_are_listed_with_what_they_move(tmp_path: Path) -> None:
    """From 1.1.0 on attributes say operation, group and elements."""
    told = {"collective_name": "allreduce", "pg_name": "3", "pg_size": 8, "in_msg_nelems": 99}
    nodes = [nested(1, ROOT, 1), nested(2, "record_param_comms", 1, **told)]
    trace = read_execution_trace(write(tmp_path / "et.json", NEW_SCHEMAS[-1], nodes))
    (found,) = trace.collectives()
    assert (found.name, found.group, found.group_size) == ("allreduce", "3", 8)
    assert (found.in_elements, found.out_elements) == (99, 6)


def test_old_collectives_are_named_by_their_inputs_and_waits_left_out(tmp_path: Path) -> None:
    """1.0.1 passes the operation as a string input; waiting for one is no communication."""

    def comms(id: int, name: str) -> dict[str, Any]:
        values = {"inputs": [5, name], "input_shapes": [[48], []]}
        return flat(id, "record_param_comms", 1, **values, input_types=["Tensor(float)", "String"])

    nodes = [flat(1, ROOT, 1), comms(2, "all_to_allv"), comms(3, "wait")]
    trace = read_execution_trace(write(tmp_path / "et.json", "1.0.1", nodes))
    assert [(c.name, c.in_elements) for c in trace.collectives()] == [("all_to_allv", 48)]


@pytest.mark.parametrize("schema", ["1.0.0", "2.0.0", "1.2.0-chakra.0.0.4", "nonsense"])
def test_other_schemas_are_refused(tmp_path: Path, schema: str) -> None:
    """The message says which schemas can be read."""
    with pytest.raises(FormatError, match=r"1\.0\.1 … 1\.1\.1"):
        read_execution_trace(write(tmp_path / "et.json", schema, []))


def test_node_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    """A node is read whole or refused."""
    broken = {k: v for k, v in nested(4, "aten::mm", 4).items() if k != "ctrl_deps"}
    with pytest.raises(FormatError, match="node 4"):
        read_execution_trace(write(tmp_path / "et.json", NEW_SCHEMAS[0], [broken]))


def test_missing_parent_is_refused(tmp_path: Path) -> None:
    """A truncated list of nodes leaves children without their parent."""
    with pytest.raises(FormatError, match="within 1, which is missing"):
        read_execution_trace(write(tmp_path / "et.json", "1.0.1", [flat(2, "aten::mm", 1)]))


def test_other_json_is_refused(tmp_path: Path) -> None:
    """A Kineto trace is no execution trace."""
    path = tmp_path / "et.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(FormatError, match="not a PyTorch execution trace"):
        read_execution_trace(path)
