"""What happened to a GPU's memory: peaks, kinds, and the file it is kept in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.analysis.memory.memory_kinds import layer_of, memory_peak
from prismscale.analysis.memory.memory_log import (
    Action,
    load_memory_log,
    save_memory_log,
)
from prismscale.analysis.memory.memory_timeline import memory_timeline
from prismscale.errors import FormatError
from support.memory_logs import EVENTS, log_of


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


def test_what_lives_on_for_steps_is_no_activation() -> None:
    """DDP's buckets are made in a forward pass; the last loss goes with the next one."""
    a, f = Action.ALLOC, Action.FREE_REQUESTED
    events = (
        (a, 1, 50, "forward"),
        (a, 2, 9, "forward"),
        (a, 3, 20, "forward"),
        (f, 3, 20, "backward"),
        (a, 4, 9, "forward"),
        (f, 2, 9, "forward"),
        (a, 5, 20, "forward"),
        (f, 5, 20, "backward"),
    )
    peak = memory_peak(log_of(*events, step_starts=(0, 4)))

    assert {kind.kind: kind.n_bytes for kind in peak.kinds} == {
        "activations": 20,
        "kept across steps": 50,
        "temporaries": 9,
    }


def test_what_outlives_a_microbatch_is_a_gradient() -> None:
    """Made in its backward pass, and given back in that of a later one."""
    a, f = Action.ALLOC, Action.FREE_REQUESTED
    events = (
        (a, 1, 50, "backward"),
        (a, 2, 7, "backward"),
        (f, 2, 7, "backward"),
        (a, 3, 20, "forward"),
        (a, 4, 9, "backward"),
        (f, 1, 50, "backward"),
        (f, 4, 9, "backward"),
        (f, 3, 20, "backward"),
    )
    peak = memory_peak(log_of(*events))

    assert {kind.kind: kind.n_bytes for kind in peak.kinds} == {
        "gradients": 50,
        "activations": 20,
        "temporaries": 9,
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
            events.append((Action.FREE_REQUESTED, address, held.pop(address), "forward"))
        else:
            held[address] = size
            events.append((Action.ALLOC, address, size, "forward"))
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
