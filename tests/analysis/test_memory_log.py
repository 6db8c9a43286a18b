"""What happened to a GPU's memory: peaks, kinds, and the file it is kept in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.analysis.memory.memory_kinds import layer_of, memory_peak
from prismscale.analysis.memory.memory_log import (
    NOBODY,
    Action,
    MemoryLog,
    Origin,
    Tables,
    load_memory_log,
    save_memory_log,
)
from prismscale.analysis.memory.memory_timeline import memory_timeline
from prismscale.errors import FormatError

LABELS = ("", "forward", "backward", "optimizer")
A, F = Action.ALLOC, Action.FREE_REQUESTED


def log_of(
    *events: tuple[Action, int, int, str], owners: dict[int, int] | None = None
) -> MemoryLog:
    """Of (action, address, bytes, what the program does)."""
    n = len(events)
    column = {name: np.zeros(n, dtype=np.int64) for name in ("made_by", "stream", "origin")}
    owner_E = np.full(n, NOBODY, dtype=np.int64)
    for event, owner in (owners or {}).items():
        owner_E[event] = owner
    size_E = np.array([e[2] for e in events], dtype=np.int64)
    return MemoryLog(
        rank=3,
        tables=Tables(
            ops=("aten::mm",),
            origins=(Origin("", "", False), Origin("train.py:7", "layers.2.mlp", False)),
            labels=LABELS,
            owners=(("parameters", "layers.0.weight"),),
        ),
        step_starts=(0,),
        action_E=np.array([e[0] for e in events], dtype=np.int64),
        address_E=np.array([e[1] for e in events], dtype=np.int64),
        bytes_E=size_E,
        block_bytes_E=size_E,
        time_ns_E=np.arange(n, dtype=np.int64),
        made_by_E=column["made_by"],
        origin_E=column["origin"],
        label_E=np.array([LABELS.index(e[3]) for e in events], dtype=np.int64),
        stream_E=column["stream"],
        owner_E=owner_E,
        **{f"block_{name}_B": np.zeros(0, dtype=np.int64) for name in BLOCK_COLUMNS},
    )


BLOCK_COLUMNS = ("address", "size", "requested", "stream", "flags", "made_by")
EVENTS = (
    (A, 1, 100, ""),
    (A, 2, 10, "forward"),
    (A, 3, 20, "forward"),
    (F, 3, 20, "forward"),
    (A, 3, 30, "forward"),
    (A, 4, 40, "backward"),
    (F, 3, 30, "backward"),
    (F, 2, 10, "backward"),
)


def test_kinds_follow_from_when_blocks_come_and_go() -> None:
    """What a forward pass leaves for the backward one is an activation; what the program's objects
    hold is theirs; the rest is temporary."""
    peak = memory_peak(log_of(*EVENTS, owners={0: 0}))

    assert peak.allocated_bytes == 180
    assert peak.when == "backward"
    assert {kind.kind: kind.n_bytes for kind in peak.kinds} == {
        "parameters": 100,
        "activations": 40,
        "temporaries": 40,
    }


def test_the_largest_blocks_have_their_lives() -> None:
    """Where they were made and given back, and how long they lived."""
    largest = memory_peak(log_of(*EVENTS, owners={0: 0})).largest

    assert [block.n_bytes for block in largest] == [100, 40, 30, 10]
    assert largest[0].what == "layers.0.weight"
    assert (largest[0].freed_in, largest[0].life_ns) == ("", None)
    assert (largest[2].made_in, largest[2].freed_in) == ("forward, step 1", "backward, step 1")
    assert largest[2].life_ns == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100)), max_size=60))
def test_the_peak_is_that_of_a_plain_count(wanted: list[tuple[int, int]]) -> None:
    """Whatever comes and goes: the most that is held at a time, and who holds it."""
    events, held, most = [], dict[int, int](), 0
    for address, size in wanted:
        if address in held:
            events.append((F, address, held.pop(address), "forward"))
        else:
            held[address] = size
            events.append((A, address, size, "forward"))
        most = max(most, sum(held.values()))
    peak = memory_peak(log_of(*events))

    assert peak.allocated_bytes == most
    assert sum(kind.n_bytes for kind in peak.kinds) == most


def test_a_timeline_shows_the_peak() -> None:
    """By kind, however few points it has."""
    log = log_of(*EVENTS, owners={0: 0})

    for most in (1, 3, 600):
        total_T = memory_timeline(log, most).bytes_KT.sum(axis=0)
        assert total_T.max() == memory_peak(log).allocated_bytes


def test_a_log_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Columns and tables."""
    log = log_of(*EVENTS, owners={0: 0})
    save_memory_log(log, tmp_path / "memory.parquet")

    read = load_memory_log(tmp_path / "memory.parquet")

    assert (read.rank, read.tables, read.step_starts) == (3, log.tables, (0,))
    assert memory_peak(read) == memory_peak(log)


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    """A number that points nowhere is named, before anything stumbles over it."""
    log = log_of(*EVENTS, owners={0: 7})
    save_memory_log(log, tmp_path / "memory.parquet")

    with pytest.raises(FormatError, match="owner_E"):
        load_memory_log(tmp_path / "memory.parquet")


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.3.attention.wq", "layers.3"),
        ("model.decoder.layers.11.mlp", "model.decoder.layers.11"),
        ("embed", "embed"),
        ("head.weight", "head"),
        ("0.weight", "0"),
    ],
)
def test_layers_by_their_names(name: str, layer: str) -> None:
    """Up to the first number; without one, the first part."""
    assert layer_of(name) == layer
