"""Import of Kineto traces: waiting told apart across ranks, edges inferred, bad input refused."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from prismscale.errors import FormatError
from prismscale.formats.kineto import read_kineto
from prismscale.formats.kineto.events import read_events
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.sim.timeline import simulate
from support.kineto_traces import ALL_REDUCE_US, STEP_US, US, event, rank_events, two_ranks, write


def communications(trace: RankTrace) -> list[int]:
    return list(trace.communications(0, trace.n_nodes))


def position(trace: RankTrace, label: str) -> int:
    return [trace.labels[i] for i in trace.label_N.tolist()].index(label)


def pred_labels(trace: RankTrace, node: int) -> set[str]:
    sources = [node - int(d) for d in trace.predecessors(node)]
    return {trace.labels[int(trace.label_N[s])] for s in sources if s >= 0}


def test_replay_takes_as_long_as_recorded(tmp_path: Path) -> None:
    """Each recorded step comes out of the engine as it went in."""
    samples = read_kineto(two_ranks(tmp_path)).samples
    assert samples.observed_step_ns_T is not None
    for t in range(samples.n_steps):
        replayed = simulate(samples.graph, samples.durations(t), steps=1).step_ns
        assert replayed == samples.observed_step_ns_T[t] == STEP_US * US


def test_profiler_steps_give_the_samples(tmp_path: Path) -> None:
    """Steps carry the profiler's numbers."""
    assert read_kineto(two_ranks(tmp_path)).samples.step_ids == (3, 4)


def test_collective_lasts_from_the_last_arrival(tmp_path: Path) -> None:
    """The early rank's wait is no part of the all-reduce; bytes and group come from the trace."""
    graph = read_kineto(two_ranks(tmp_path)).samples.graph
    for rank_class in graph.classes:
        trace = rank_class.trace
        (node,) = communications(trace)
        assert trace.op_N[node] == CollectiveOp.ALL_REDUCE
        assert trace.bytes_N[node] == 1024
        assert trace.groups[int(trace.group_index_N[node])].ranks == (0, 1)
        assert trace.body_ns_SB[:, node].tolist() == [ALL_REDUCE_US * US] * 2


def test_wait_between_streams_is_inferred(tmp_path: Path) -> None:
    """A kernel that starts when another stream's kernel ends depends on it."""
    trace = read_kineto(two_ranks(tmp_path)).samples.graph.classes[0].trace
    (all_reduce,) = communications(trace)
    assert pred_labels(trace, all_reduce - 1) == {"host", "gemm"}


def test_host_waits_for_the_device_it_synchronizes_with(tmp_path: Path) -> None:
    """cudaDeviceSynchronize ends after the kernel that ended within it."""
    trace = read_kineto(two_ranks(tmp_path)).samples.graph.classes[0].trace
    assert pred_labels(trace, position(trace, "cudaDeviceSynchronize")) == {"host", "adam"}


def test_clocks_of_two_machines_are_aligned(tmp_path: Path) -> None:
    """A rank whose clock is a day ahead gives the same job."""
    rank_0, rank_1 = two_ranks(tmp_path)
    start = 10 + 7 + 50 + 200 + 2
    shifted = [{**e, "ts": e["ts"] + 86_400e6} for e in rank_events(50.0, start)]
    ahead = write(tmp_path / "ahead.json", shifted, rank=1)
    expected, got = (read_kineto([rank_0, p]).samples for p in (rank_1, ahead))
    assert expected.observed_step_ns_T is not None
    assert got.observed_step_ns_T is not None
    assert got.observed_step_ns_T.tolist() == expected.observed_step_ns_T.tolist()


def test_trace_without_profiler_steps_is_one_step(tmp_path: Path) -> None:
    """One step from the first launch to the last call."""
    events = [e for e in rank_events(0.0, 300.0) if "ProfilerStep" not in e["name"]]
    samples = read_kineto([write(tmp_path / "r.json", events)]).samples
    assert samples.step_ids == (0,)


def test_old_trace_names_its_collective_by_kernel(tmp_path: Path) -> None:
    """Without arguments, operation comes from the kernel and bytes from the span around it."""
    events = rank_events(0.0, 300.0, steps=1)
    for e in events:
        if "AllReduce" in e["name"]:
            e["args"] = {"correlation": 1, "stream": 9}
    told = {"Input Dims": [[64]], "Input type": ["float"]}
    events.append(event("user_annotation", "nccl:all_reduce", 18, 20, args=told))
    trace = read_kineto([write(tmp_path / "r.json", events)]).samples.graph.classes[0].trace
    (node,) = communications(trace)
    assert trace.op_N[node] == CollectiveOp.ALL_REDUCE
    assert trace.bytes_N[node] == 256


def test_steps_of_another_shape_are_left_out_and_named(tmp_path: Path) -> None:
    """A step that launches other kernels is no sample of the same body."""
    events = rank_events(0.0, 300.0, steps=3)
    events = [e for e in events if not (e["name"] == "adam" and e["ts"] < STEP_US)]
    imported = read_kineto([write(tmp_path / "r.json", events)])
    assert imported.samples.step_ids == (4, 5)
    assert "steps 3 launch other work: left out" in imported.repairs[0]


def test_archive_of_ranks_is_read(tmp_path: Path) -> None:
    """A tar archive holds one trace a rank."""
    archive = tmp_path / "all.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in two_ranks(tmp_path):
            tar.add(path, arcname=path.name)
    assert read_kineto([archive]).samples.graph.world_size == 2


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.95])
def test_truncated_gzip_is_refused(tmp_path: Path, keep: float) -> None:
    """Half a file is no trace."""
    path = two_ranks(tmp_path)[0]
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(FormatError, match=r"truncated|no JSON"):
        read_kineto([path])


def test_truncated_json_is_refused(tmp_path: Path) -> None:
    """The message says where it ends."""
    path = write(tmp_path / "r.json", rank_events(0.0, 300.0))
    path.write_text(path.read_text()[:-40])
    with pytest.raises(FormatError, match="truncated"):
        read_kineto([path])


def test_impossible_times_are_dropped_and_counted(tmp_path: Path) -> None:
    """NaN and negative durations cost their event only."""
    extra = [event("kernel", "k", 5, -3.0), event("kernel", "k", float("nan"), 1.0)]
    imported = read_kineto([write(tmp_path / "r.json", [*rank_events(0.0, 300.0), *extra])])
    assert "2 events with impossible times dropped" in imported.repairs[0]


def test_same_rank_twice_is_refused(tmp_path: Path) -> None:
    """Two files of one rank do not make a job."""
    paths = [write(tmp_path / f"{n}.json", rank_events(0.0, 300.0)) for n in "ab"]
    with pytest.raises(FormatError, match="same rank"):
        read_kineto(paths)


def test_ranks_with_different_numbers_of_collectives_are_refused(tmp_path: Path) -> None:
    """The message names both files and their counts."""
    lone = [e for e in rank_events(0.0, 300.0) if "AllReduce" not in e["name"]]
    paths = [two_ranks(tmp_path)[0], write(tmp_path / "lone.json", lone, rank=1)]
    with pytest.raises(FormatError, match="different numbers of communications"):
        read_kineto(paths)


def test_trace_without_device_work_is_refused(tmp_path: Path) -> None:
    """A CPU-only profile says nothing about kernels."""
    path = write(tmp_path / "r.json", [event("cpu_op", "aten::mm", 0, 5)])
    with pytest.raises(FormatError, match="no device activity"):
        read_kineto([path])


def test_every_kernel_of_a_cuda_graph_is_kept(tmp_path: Path) -> None:
    """One launch, three kernels, on two streams."""
    told = {"correlation": 7}
    events = [event("cuda_runtime", "cudaGraphLaunch", 10, 5, args=told)]
    for n, stream in enumerate((7, 7, 9)):
        args = told | {"stream": stream}
        events.append(event("kernel", f"k{n}", 20 + 10 * n, 10, tid=stream, args=args))
    path = write(tmp_path / "graph.json", events, world_size=1)

    (rank_class,) = read_kineto([path]).samples.graph.classes

    trace = rank_class.trace
    assert {"k0", "k1", "k2"} <= {trace.labels[i] for i in trace.label_N.tolist()}
    assert "k0" in {
        trace.labels[int(trace.label_N[position(trace, "k1") - 2])],
        *pred_labels(trace, position(trace, "k1") - 1),
    }


def test_no_kind_of_event_is_kept_without_a_limit(tmp_path: Path) -> None:
    """Waits and communications count as well as kernels."""
    told = [event("cuda_runtime", "cudaDeviceSynchronize", n, 1) for n in range(20)]
    path = write(tmp_path / "many.json.gz", [*rank_events(0, 300), *told])
    with gzip.open(path) as file, pytest.raises(FormatError, match="more than 30 device"):
        read_events("many", file, max_events=30)
