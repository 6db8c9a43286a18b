"""Flight records of strangers: read without running anything, within bounds."""

from __future__ import annotations

import json
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prismscale.errors import FormatError, UsageError
from prismscale.formats.flight_recorder.dump_reader import load_flight_record
from prismscale.formats.flight_recorder.plain_pickle import plain_pickle
from prismscale.formats.flight_recorder.rank_calls import CallState

ENTRY = {
    "record_id": 0,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "op_id": 1,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": ((3, 4),),
    "input_dtypes": ["Float"],
    "output_sizes": ((3, 4),),
    "output_dtypes": ["Float"],
    "state": "started",
    "frames": [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c.py", "line": 1},
        {"name": "step", "filename": "/home/me/train.py", "line": 12},
    ],
    "is_p2p": False,
}
DUMP: dict[str, Any] = {
    "version": "2.10",
    "entries": [ENTRY],
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
}


def test_a_real_dump_is_read(tmp_path: Path) -> None:
    """The user's line, sizes, groups as torch writes them; as pickle or JSON."""
    (tmp_path / "dump_0").write_bytes(pickle.dumps(DUMP, protocol=2))
    (tmp_path / "dump_1.json").write_text(json.dumps(DUMP))
    record = load_flight_record(tmp_path)
    assert (sorted(record.ranks), record.world_size) == ([0, 1], 2)
    columns = record.ranks[1].columns
    assert columns is record.ranks[0].columns
    assert columns.state_N.tolist() == [CallState.STARTED]
    assert record.site(int(columns.site_N[0])) == "/home/me/train.py:12"
    assert record.shapes[0].input_sizes == ((3, 4),)


class Hostile:
    """Runs a command where it is unpickled as pickles are."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/prismscale-was-here",)


@pytest.mark.parametrize("held", [Hostile(), np.int64(3), {"a": {1, Path("x")}}, print])
def test_classes_and_functions_are_refused(held: object) -> None:
    """Nothing is looked up, so nothing runs."""
    with pytest.raises(FormatError, match="it names"):
        plain_pickle(pickle.dumps(held), "file")
    assert not Path("/tmp/prismscale-was-here").exists()


@pytest.mark.parametrize(
    "data",
    [b"r\xff\xff\xff\x7f", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00", b"(" * 40 + b"lll", b"", b"N"],
)
def test_reading_takes_bounded_memory(data: bytes) -> None:
    """A few bytes may ask for a memo of 2**31 places, or for a string of 2**56 bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match="no pickle of plain containers"):
        plain_pickle(b"N" + data, "file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("size", [1 << 20, 1 << 61])
def test_a_bytearray_that_is_not_there_is_refused_in_silence(
    size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """CPython's own reader may print that it was in use."""
    for _ in range(100):
        with pytest.raises(FormatError, match="no pickle of plain containers"):
            plain_pickle(b"\x80\x05\x96" + size.to_bytes(8, "little") + b"short", "file")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.0"},
        {"entries": 5},
        {"pg_config": {}},
        {"pg_config": {"0": {"desc": "x", "ranks": "__import__('os')"}}},
        {"entries": [ENTRY | {"state": "lost"}]},
        {"entries": [ENTRY | {"profiling_name": "nccl:send 0->1"}], "pg_config": {}},
        {"entries": [ENTRY | {"profiling_name": "nccl:send"}]},
        {"entries": [ENTRY | {"collective_seq_id": 10**400}]},
    ],
)
def test_other_pickles_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """With the file's name."""
    (tmp_path / "dump_0").write_bytes(pickle.dumps(DUMP | change))
    with pytest.raises(FormatError, match="dump_0: no flight record"):
        load_flight_record(tmp_path)


def test_files_must_be_of_one_job(tmp_path: Path) -> None:
    """A folder without records, or with those of two prefixes, is refused."""
    with pytest.raises(UsageError, match="holds no flight record"):
        load_flight_record(tmp_path)
    for name in ("a_0", "b_0"):
        (tmp_path / name).write_bytes(pickle.dumps(DUMP))
    with pytest.raises(UsageError, match="'a_', 'b_'"):
        load_flight_record(tmp_path)
    assert load_flight_record(tmp_path, "b_").world_size == 2
