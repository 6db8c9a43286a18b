"""Readers of strangers' files under damage, for some seconds; ``bench/fuzz.py`` does it for
hours."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.foreign_reader import Reader
from support.fuzzing import fuzz
from support.readers import all_readers

CASES, SECONDS = 150, 6.0


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """By name."""
    return {r.name: r for r in all_readers(tmp_path_factory.mktemp("readers"))}


NAMES = (
    *("cluster", "variability", "fleet", "rules", "kernel times", "null device", "scenario"),
    *("flight record, JSON", "flight record", "nodes", "sniff test", "nccl-tests", "routing"),
    *("payload", "Kineto", "Chakra, et", "Chakra, json", "straggler", "trace"),
    *("graph, graph.parquet", "results", "periodic events", "timeline", "samples"),
    *("memory log", "launch log"),
)
LOGS = ("sniff test",)
"""Readers of a program's log, into which it prints whatever it likes: little of it is an error."""


def test_every_reader_is_named(readers: dict[str, Reader]) -> None:
    """A new one is tested here, too."""
    assert sorted(readers) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_damage_gives_a_clear_error(name: str, readers: dict[str, Reader], tmp_path: Path) -> None:
    """Or no error, where it did not matter: no traceback, no hang, bounded memory and messages."""
    found = fuzz(readers[name], tmp_path, 1, cases=CASES, until=time.monotonic() + SECONDS)
    assert not found.failures
    assert found.refused > found.cases / 10 or name in LOGS
