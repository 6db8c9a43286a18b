"""What a row says of a point that has no figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.errors import PrismscaleError, ScriptError, StorageError, UsageError
from prismscale.explore.outcome import LONGEST, Outcome, Status, failed, sentence

ARGPARSE = """usage: train.py [-h] [--tp TP]
train.py: error: unrecognized arguments: --tpp 2"""
BOXED = """some log line
╭─ Unrecognized options ─────────────────╮
│ Unrecognized options: --tpp             │
│ ──────────────────────────────────────  │
│ For full helptext, run train --help     │
╰─────────────────────────────────────────╯"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (ARGPARSE, "train.py: error: unrecognized arguments: --tpp 2"),
        (BOXED, "Unrecognized options: --tpp"),
        ("ValueError: 3 is odd. Choose 2 or 4. " + "More. " * 40, "ValueError: 3 is odd. Choose 2"),
        ("done\nbye", "bye"),
        ("", ""),
    ],
)
def test_the_telling_line_is_shown(said: str, told: str) -> None:
    """Of an error its first sentences, of an output the line that speaks of an error."""
    assert sentence(said)[: len(told)] == told
    assert len(sentence(said)) <= LONGEST


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ScriptError("…", rank=0, said="ValueError: no"), Status.REFUSED),
        (ScriptError("…", rank=0, said="OutOfMemoryError: CUDA out of memory."), Status.TOO_LARGE),
        (ScriptError("rank 0 was ended by signal 9", rank=0), Status.BROKEN),
        (UsageError("world size is 0"), Status.REFUSED),
        (StorageError("no space"), Status.BROKEN),
        (PrismscaleError("the process that starts ranks has ended"), Status.BROKEN),
    ],
)
def test_errors_are_told_apart(error: PrismscaleError, status: Status) -> None:
    """What the point itself causes is kept; what the machine causes is tried again."""
    found = failed("key", error)
    assert found.status is status
    assert found.is_final is (status is not Status.BROKEN)


def test_what_does_not_fit_says_no_more_of_memory() -> None:
    """It fits not, whatever else is known; elsewhere the figures decide."""
    assert Outcome(key="", status=Status.TOO_LARGE).fits is False
    assert Outcome(key="", status=Status.DONE).fits is None
    assert Outcome(key="", status=Status.DONE, held_bytes=2, memory_bytes=2).fits is True
    assert Outcome(key="", status=Status.DONE, held_bytes=3, memory_bytes=2).fits is False


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Enumerations and None among it."""
    outcome = Outcome(key="k", status=Status.TOO_LARGE, reason="ü", mfu=0.25, step_ns=None)
    outcome.save(tmp_path / "o.json")
    assert Outcome.load(tmp_path / "o.json") == outcome
