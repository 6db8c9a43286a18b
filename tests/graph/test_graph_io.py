"""Traces, graphs and timelines on disk: round trips, damage, malice, and disks that refuse."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prismscale.errors import FormatError, StorageError, UsageError
from prismscale.files import atomic_write
from prismscale.graph import parquet
from prismscale.graph.facts import CaptureFacts, CoRunFacts, StepFacts
from prismscale.graph.io import load_graph, load_trace, save_graph, save_trace
from prismscale.graph.parquet import DIGEST_KEY, HEADER_KEY, VERSION, Header, to_runs
from prismscale.graph.trace import MemoryRecord, RankTrace
from prismscale.graph.trace_columns import PLAIN
from prismscale.sim.timeline import simulate
from prismscale.sim.timeline_io import load_timeline, save_timeline
from support.disks import file_size_limit
from support.jobs import RecordedDurations, pipeline_job, pipeline_traces
from support.strategies import Job, jobs

WITHOUT_PANDAS = """
import sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from prismscale.graph.parquet import column, integers, list_column, numbers, lists, read_table
from prismscale.graph.parquet import schema_of, write_table
path, schema = Path(sys.argv[1]), schema_of(plain=pa.int32(), rows=integers(64))
rows = list_column(np.array([0, 1, 1, 4]), np.arange(4), integers(64))
columns = [column(np.arange(3), pa.int32()), rows]
write_table(path, pa.table(columns, schema=schema), kind="test", header={})
table, _ = read_table(path, schema, kind="test")
print(numbers(table, "plain").tolist(), [part.tolist() for part in lists(table, "rows")])
print("pandas" in sys.modules)
"""

in_one_folder = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

FACTS = CaptureFacts(
    device="null",
    modelled=True,
    calls_per_step=2,
    step_starts=(3, 5),
    co_run=CoRunFacts(issue_ns=30, common_jitter=0.5, ranks=(0, 1)),
    step=StepFacts(number=4, work="w"),
)


def assert_same(one: Any, other: Any) -> None:
    """Equal in every field, array dtypes included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.fixture
def trace() -> RankTrace:
    """The second stage of a small pipeline, with everything a trace can carry."""
    memory = MemoryRecord(
        peak_bytes=5_000, peak_step=-1, step_peak_bytes=(3_000, 4_000), source="modelled"
    )
    return dataclasses.replace(
        pipeline_traces(2, 2, 2, 2, samples=3)[4], memory=memory, facts=FACTS
    )


@pytest.fixture
def trace_file(trace: RankTrace, tmp_path: Path) -> Path:
    """That trace, saved."""
    save_trace(trace, tmp_path / "rank-4.parquet")
    return tmp_path / "rank-4.parquet"


@given(job=jobs())
@in_one_folder
def test_graph_comes_back_as_it_was(job: Job, tmp_path: Path) -> None:
    """A graph that was saved and loaded has equal classes, slots, families and coverage."""
    save_graph(job.graph, tmp_path)

    assert_same(job.graph, load_graph(tmp_path))


@given(job=jobs())
@in_one_folder
def test_trace_comes_back_as_it_was(job: Job, tmp_path: Path) -> None:
    """A trace that was saved and loaded is equal, to the type of each column."""
    for trace in job.traces.values():
        save_trace(trace, tmp_path / "trace.parquet")
        assert_same(trace, load_trace(tmp_path / "trace.parquet"))


def test_memory_and_samples_come_back(trace: RankTrace, trace_file: Path) -> None:
    """Memory, provenance and several sampled steps are part of the file."""
    loaded = load_trace(trace_file)

    assert_same(trace, loaded)
    assert loaded.body_ns_SB.shape[0] == 3


def test_classes_share_their_trace(tmp_path: Path) -> None:
    """Two classes that run one trace run one object again after loading."""
    graph = pipeline_job(2, 2, 2, 1)
    twin = dataclasses.replace(graph.classes[0], trace=graph.classes[1].trace)
    save_graph(dataclasses.replace(graph, classes=(twin, graph.classes[1])), tmp_path)

    first, second = load_graph(tmp_path).classes

    assert first.trace is second.trace


@given(job=jobs(), seed=st.integers(0, 2**32 - 1))
@in_one_folder
def test_timeline_comes_back_as_it_was(job: Job, seed: int, tmp_path: Path) -> None:
    """Step ends of all ranks and node times of the kept ones survive."""
    kept = np.random.default_rng(seed).integers(0, job.graph.world_size, size=3).tolist()
    timeline = simulate(job.graph, RecordedDurations(job.graph), steps=2, ranks=kept)
    save_timeline(timeline, tmp_path / "timeline.parquet")

    loaded = load_timeline(tmp_path / "timeline.parquet", job.graph)

    assert_same(timeline.step_end_ns_TDR, loaded.step_end_ns_TDR)
    assert_same(tuple(timeline.ranks.values()), tuple(loaded.ranks[r] for r in timeline.ranks))


def test_timeline_of_another_graph_is_refused(tmp_path: Path) -> None:
    """A timeline fits only the graph it was simulated on."""
    graph, other = pipeline_job(2, 2, 2, 2), pipeline_job(2, 2, 2, 3)
    save_timeline(simulate(graph, RecordedDurations(graph)), tmp_path / "t")

    with pytest.raises(FormatError, match="belongs to another graph"):
        load_timeline(tmp_path / "t", other)


@given(st.lists(st.integers(0, 99)))
def test_runs_unfold_to_what_they_were_made_of(values: list[int]) -> None:
    """Any sequence of numbers survives being written as runs."""
    header = Header(path=Path("f"), place="header", content={"x": to_runs(values)})

    assert header.runs("x", 0, 100) == tuple(values)


def test_mesh_axis_is_one_run() -> None:
    """A group with a constant stride takes three numbers, whatever its size."""
    assert to_runs(range(5, 65_536, 8)) == [5, 8, 8_192]


@given(data=st.data())
@in_one_folder
def test_any_flipped_byte_is_noticed(data: st.DataObject, tmp_path: Path) -> None:
    """No single damaged byte passes as a good file or raises anything but FormatError."""
    path = tmp_path / "trace.parquet"
    save_trace(pipeline_traces(2, 2, 2, 1)[0], path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)

    try:
        loaded = load_trace(path)
    except FormatError:
        return
    assert_same(pipeline_traces(2, 2, 2, 1)[0], loaded)


@given(data=st.data())
@in_one_folder
def test_file_cut_short_is_refused(data: st.DataObject, tmp_path: Path) -> None:
    """A file that ends early, at any byte, is a FormatError that says what to do."""
    path = tmp_path / "trace.parquet"
    save_trace(pipeline_traces(2, 2, 2, 1)[0], path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])

    with pytest.raises(FormatError, match="make it again"):
        load_trace(path)


@given(content=st.binary(max_size=64))
@in_one_folder
def test_other_bytes_are_refused(content: bytes, tmp_path: Path) -> None:
    """A file that is not Parquet at all is a FormatError."""
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(FormatError, match="not a prismscale trace"):
        load_trace(tmp_path / "x")


def test_foreign_parquet_is_refused(tmp_path: Path) -> None:
    """A Parquet file of somebody else is named as such."""
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x")

    with pytest.raises(FormatError, match="prismscale did not write it"):
        load_trace(tmp_path / "x")


def test_graph_is_not_a_trace(tmp_path: Path) -> None:
    """A file of another of our formats is refused by name."""
    save_graph(pipeline_job(2, 1, 1, 1), tmp_path)

    with pytest.raises(FormatError, match="is a prismscale graph, not a prismscale trace"):
        load_trace(tmp_path / "graph.parquet")


def test_a_small_file_that_unfolds_to_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal values take no room in a file, however many they are."""
    path, schema = tmp_path / "many.parquet", parquet.schema_of(value=pa.int64())
    table = pa.table({"value": np.zeros(2**24, dtype=np.int64)}, schema=schema)
    parquet.write_table(path, table, kind="bomb", header={})
    assert path.stat().st_size < 2**17
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "MAX_VALUES", 2**20)
        # Arrow's own pool has room that it asked for earlier.
        pool = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        with pytest.raises(FormatError, match="at most 1,048,576 values"):
            parquet.read_table(path, schema, kind="bomb")
        # As if columns held more values than there are rows.
        patch.setattr(parquet, "_refuse_bombs", lambda *_: None)
        with pytest.raises(FormatError, match="damaged, cut short"):
            parquet.read_table(path, schema, kind="bomb")
        pa.set_memory_pool(pool)
    assert parquet.read_table(path, schema, kind="bomb")[0].num_rows == 2**24


def test_damaged_statistics_of_a_column_do_not_end_the_process(tmp_path: Path) -> None:
    """pyarrow checks them where nothing catches what it raises."""
    schema = parquet.schema_of(value=parquet.integers(64), other=pa.int64())
    path = tmp_path / "lists.parquet"
    # So many values that Thrift still reads what follows the change.
    table = pa.table({"value": [[1] * 100, [2] * 68], "other": [0, 1]}, schema=schema)
    parquet.write_table(path, table, kind="list", header={})
    data = path.read_bytes()
    # How many values begin a row, and how many do not: a list of two that becomes one of three.
    at = data.index(b"\x29\x26") + 1
    path.write_bytes(data[:at] + b"\x36" + data[at + 1 :])
    with pytest.raises(FormatError, match="damaged"):
        parquet.read_table(path, schema, kind="list")


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    """A path that leads nowhere is the caller's mistake, not a damaged file."""
    with pytest.raises(UsageError, match=r"nowhere.* cannot be read: No such file"):
        load_trace(tmp_path / "nowhere")


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of ``path`` as an attacker would: digest and all."""
    file = pq.ParquetFile(path)
    header = json.loads(file.metadata.metadata[HEADER_KEY])
    change(header)
    text = json.dumps(header).encode()
    digest = hashlib.sha256(text).hexdigest()
    table = file.read()
    with pq.ParquetWriter(path, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HEADER_KEY: text, DIGEST_KEY: digest.encode()})


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_other_version_is_refused(trace_file: Path, version: int) -> None:
    """A file of an earlier or later version names both versions and the way out."""
    forge(trace_file, lambda h: h.update(version=version))

    refusal = rf"version {version} .* reads version {VERSION}; make it again"
    with pytest.raises(FormatError, match=refusal):
        load_trace(trace_file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("calls_per_step", 0, "it must be 1 or more"),
        ("calls_in_prologue", -1, "it must be 0 or more"),
        ("period", 1, "unknown key 'period'"),
        ("co_run", {"issue_ns": "30"}, "issue_ns"),
    ],
)
def test_facts_that_cannot_be_are_refused(
    trace_file: Path, key: str, value: object, message: str
) -> None:
    """The file and the key are named."""
    forge(trace_file, lambda h: h["traces"][0]["facts"].update({key: value}))

    with pytest.raises(FormatError, match=message):
        load_trace(trace_file)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from paths_of(child, (*path, key))


hostile_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31, 2**63, 1e308, "", "x"]),
    st.lists(st.integers(-1, 2**40), max_size=6),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(data=st.data())
@settings(in_one_folder, max_examples=100)
def test_hostile_header_is_refused_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever stands in the header, the loader raises FormatError or returns a graph that can be
    saved again: it never crashes and never builds something huge."""
    save_graph(pipeline_job(2, 2, 1, 1), tmp_path)

    def vandalise(header: dict[str, Any]) -> None:
        *parents, last = data.draw(st.sampled_from(list(paths_of(header))))
        place: Any = header
        for key in parents:
            place = place[key]
        place[last] = data.draw(hostile_values)

    forge(tmp_path / "graph.parquet", vandalise)

    try:
        graph = load_graph(tmp_path)
    except FormatError:
        return
    save_graph(graph, tmp_path)


@given(data=st.data())
@settings(in_one_folder, max_examples=60)
def test_hostile_columns_are_refused_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    """Any number in any column is refused, or is one that a trace may hold."""
    trace = pipeline_traces(2, 2, 1, 1)[0]
    name = data.draw(st.sampled_from(list(PLAIN)))
    column = getattr(trace, f"{name}_N").copy()
    limits = np.iinfo(column.dtype)
    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(
        st.integers(int(limits.min), int(limits.max))
    )
    save_trace(dataclasses.replace(trace, **{f"{name}_N": column}), tmp_path / "t")

    try:
        loaded = load_trace(tmp_path / "t")
    except FormatError as error:
        assert "must be made again" in str(error)  # noqa: PT017
        return
    assert all(loaded.describe(i) for i in range(loaded.n_nodes))


@pytest.mark.parametrize(
    ("column", "value"), [("pred_distance_P", 0), ("pred_distance_P", -5), ("prologue_ns", -1)]
)
def test_impossible_edges_and_durations_are_refused(
    trace: RankTrace, tmp_path: Path, column: str, value: int
) -> None:
    """Predecessors lie before their nodes, and durations are not negative."""
    values = getattr(trace, column).copy()
    values[0] = value
    save_trace(dataclasses.replace(trace, **{column: values}), tmp_path / "t")

    with pytest.raises(FormatError, match="out of range"):
        load_trace(tmp_path / "t")


def test_runs_that_unfold_without_end_are_refused(trace_file: Path) -> None:
    """A few bytes that claim billions of ranks are refused before any list is built."""
    forge(trace_file, lambda h: h.update(world_size=2**20, rank_sets=[[0, 1, 2**20]] * 20))

    with pytest.raises(FormatError, match="unfolds to more than"):
        load_trace(trace_file)


def test_full_disk_leaves_the_old_file(trace: RankTrace, trace_file: Path) -> None:
    """A write that fails half-way names file, free space and mend, and changes nothing."""
    before = trace_file.read_bytes()

    with (
        file_size_limit(1_000),
        pytest.raises(StorageError, match=r"rank-4.parquet was not written.* GB free.*ulimit"),
    ):
        save_trace(trace, trace_file)

    assert trace_file.read_bytes() == before
    assert list(trace_file.parent.iterdir()) == [trace_file]


def test_folder_that_cannot_be_made_is_a_storage_error(trace: RankTrace, tmp_path: Path) -> None:
    """A path through a file is refused with the reason."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match="a part of that path is a file"):
        save_trace(trace, tmp_path / "file" / "deeper" / "t")


def test_name_of_a_folder_is_a_storage_error(trace: RankTrace, tmp_path: Path) -> None:
    """A folder is never replaced by a file."""
    (tmp_path / "taken" / "child").mkdir(parents=True)

    with pytest.raises(StorageError, match="a folder has that name"):
        save_trace(trace, tmp_path / "taken")


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a write leaves neither the file nor its temporary."""
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "f") as file:  # noqa: PT012
        file.write(b"half")
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []


def test_errors_of_other_files_are_not_disguised(tmp_path: Path) -> None:
    """Failing to read something else while writing is not reported as a failed write."""
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "f"):
        (tmp_path / "other").read_bytes()


def test_files_are_written_and_read_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for half a second where it is installed, and loses signals meanwhile."""
    command = [sys.executable, "-c", WITHOUT_PANDAS, str(tmp_path / "table.parquet")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["[0, 1, 2] [[0, 1, 1, 4], [0, 1, 2, 3]]", "False"]


def test_a_column_too_narrow_for_its_numbers_is_not_written() -> None:
    """Nothing is cut off."""
    with pytest.raises(StorageError, match="int32 does not hold 4,294,967,296"):
        parquet.column(np.array([1, 2**32]), pa.int32())
