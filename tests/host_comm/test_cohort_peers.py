"""Ranks of a slice communicate for real: values, and what each communication took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.launcher import CaptureRunner
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.cohort_log import Entry, Span, durations_ns
from prismscale.host_comm.cohort_peers import participants
from prismscale.host_comm.transport import End
from support.runs import TRAINER, write_program

EVERYTHING = """
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[2])
from support.emulation import all_gather_single, communicate_everything
from marker import step_ends

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
for step in range(5):
    found = communicate_everything(2, rank)
    mine = torch.full((3,), float(rank + 1))
    dist.all_reduce(mine, group=pair)
    found["all_reduce of different values"] = mine.tolist()
    gathered = torch.empty(2)
    all_gather_single(gathered, torch.tensor([float(rank)]))
    found["all_gather of different values"] = gathered.tolist()
    rows = torch.empty(3)
    sizes = [[1, 2], [2, 1]][rank], [[1, 2], [2, 1]][rank]
    dist.all_to_all_single(rows, torch.arange(3.0) + 10 * rank, *sizes)
    found["all_to_all of different values"] = rows.tolist()
    sent, received = torch.tensor([5.0 + rank]), torch.empty(1)
    ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["messages"] = received.tolist()
    words = [None, None]
    dist.all_gather_object(words, f"rank {rank}")
    found["objects"] = words
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.get_future().wait()
    dist.barrier()
    pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    step_ends()
dist.destroy_process_group()
"""


def spec_of(program: Path, folder: Path, *arguments: str, world_size: int = 2) -> CaptureSpec:
    """A job of ``program`` on a target whose processors communicate."""
    return CaptureSpec(
        rank=0,
        world_size=world_size,
        local_world_size=world_size,
        target=str(program),
        is_module=False,
        args=arguments,
        device="cpu",
        samples=2,
        step_marker="marker:step_ends",
        track_memory=False,
        communication_load=True,
        payloads=str(folder / "payloads"),
        out=str(folder / "captures"),
    )


def values(folder: Path) -> list[dict[str, list[float]]]:
    """What both ranks wrote."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_slice_gets_the_values_that_gloo_gives(tmp_path: Path) -> None:
    """Every collective, messages, objects and futures, beside the same program under gloo."""
    program = write_program(tmp_path / "program", EVERYTHING)
    folders = [tmp_path / "real", tmp_path / "slice"]
    for folder in folders:
        folder.mkdir()
    here = str(Path(__file__).parents[1])
    # As torchrun's agent, which outlives the ranks: the first to end would take its store with it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(program), str(folders[0]), here]
    real = []
    for rank in range(2):
        torchrun = RankEnvironment(rank=rank, world_size=2, master_port=store.port).variables()
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **torchrun}
        real.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=120)[1].decode() for process in real]
    assert [process.returncode for process in real] == [0, 0], said
    spec = spec_of(program, tmp_path, str(folders[1]), here)
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2)
    traces = runner.capture_together([0, 1], marks=4)
    assert values(folders[1]) == values(folders[0])
    for trace in traces:
        communicates = ~trace.computes_B
        assert (trace.body_ns_SB[:, communicates] > 0).all()


def test_both_ranks_of_a_slice_tell_the_same_durations(tmp_path: Path) -> None:
    """A communication has one."""
    spec = spec_of(write_program(tmp_path / "program"), tmp_path)
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2)
    first, second = runner.capture_together([0, 1], marks=4)
    communicates = ~first.computes_B
    told = [trace.body_ns_SB[:, communicates].tolist() for trace in (first, second)]
    assert told[0] == told[1]


def test_ranks_of_a_slice_tell_what_of_their_jitter_they_share(tmp_path: Path) -> None:
    """A correlation, or nothing."""
    spec = spec_of(write_program(tmp_path / "program"), tmp_path)
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2)
    for trace in runner.capture_together([0, 1], marks=4):
        assert trace.facts.co_run is not None
        assert 0 <= trace.facts.co_run.common_jitter <= 1


@pytest.mark.parametrize(
    ("on_a_node", "co_measured_with"), [(2, [{0, 1}, {0, 1}]), (1, [{0}, {1}])]
)
def test_ranks_of_a_slice_tell_with_whom_of_their_node_they_communicated(
    tmp_path: Path, on_a_node: int, co_measured_with: list[set[int]]
) -> None:
    """What a network takes between nodes of the target was not measured here."""
    spec = replace(
        spec_of(write_program(tmp_path / "program"), tmp_path), local_world_size=on_a_node
    )
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2)
    traces = runner.capture_together([0, 1], marks=4)
    assert [trace.co_measured_with for trace in traces] == co_measured_with


def test_a_ring_of_messages_connects_before_all_have_sent(tmp_path: Path) -> None:
    """Each of three ranks sends to the next one, twice, and receives only then."""
    program = write_program(tmp_path / "program", RING)
    spec = spec_of(program, tmp_path, world_size=3)
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=3)
    runner.capture_together([0, 1, 2], marks=4)
    for rank in range(3):
        before = (rank - 1) % 3
        said = (tmp_path / "logs" / f"slice-rank-{rank}.log").read_text()
        assert f"received [{before}.0, {before + 10}.0]" in said


RING = """
import os

import torch
import torch.distributed as dist

from marker import step_ends

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
for step in range(5):
    if rank < 2:
        # Messages first, and at once a collective of the same two.
        first = [dist.isend(torch.ones(1), 1 - rank, group=pair) for _ in range(2)]
        dist.all_reduce(torch.ones(1), group=pair)
        for work in [dist.irecv(torch.empty(1), 1 - rank, group=pair) for _ in range(2)] + first:
            work.wait()
    sent = [dist.isend(torch.tensor([x]), (rank + 1) % 3) for x in (rank + 0.0, rank + 10.0)]
    met = torch.empty(2)
    received = [dist.irecv(met[i : i + 1], (rank - 1) % 3) for i in range(2)]
    for work in received + sent:
        work.wait()
    dist.barrier()
    print("received", met.tolist(), flush=True)
    step_ends()
dist.destroy_process_group()
"""


def test_what_others_take_part_in_is_answered_as_in_any_capture(tmp_path: Path) -> None:
    """Ranks 0 and 1 of four: a pair of their own is real, the world is mirrored."""
    text = TRAINER.replace('("gloo")', '("gloo")\npair = dist.new_group([0, 1])')
    text = text.replace("all_reduce(met)", "all_reduce(met)\n    dist.all_reduce(met, group=pair)")
    spec = spec_of(write_program(tmp_path / "program", text), tmp_path, world_size=4)
    CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2).capture_together([0, 1], marks=4)
    for rank in range(2):
        # 4 of this rank's own from the world; then 4 + 8 between the two.
        assert "together 12.0" in (tmp_path / "logs" / f"slice-rank-{rank}.log").read_text()


def test_a_slice_that_is_there_whole_is_read(tmp_path: Path) -> None:
    """And one of which a part is missing is captured again, all of it."""
    spec = spec_of(write_program(tmp_path / "program"), tmp_path)
    log = tmp_path / "logs" / "slice-rank-0.log"

    def capture() -> bool:
        log.unlink(missing_ok=True)
        CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2).capture_together([0, 1], marks=4)
        return log.exists()

    assert capture()
    assert not capture()
    replace(spec, rank=1, out=str(tmp_path / "captures" / "slices" / "0-1")).trace_path.unlink()
    assert capture()


def test_a_program_that_ends_early_beside_others_is_told(tmp_path: Path) -> None:
    """It made fewer steps than alone."""
    spec = spec_of(write_program(tmp_path / "program"), tmp_path)
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs", jobs=2)
    with pytest.raises(UsageError, match="made 50 optimizer calls beside other captured ranks"):
        runner.capture_together([0, 1], marks=60)


def entry(name: str, arrived_ns: int, ended_ns: int, **more: object) -> Entry:
    """A collective of two, unless it is said to be a message."""
    fields = {"members": 2, "kind": "all_reduce of 8", "channel": "c", "is_message": False}
    return Entry(
        **{"receives": True, **fields, **more},  # type: ignore[arg-type]
        name=name,
        arrived_ns=arrived_ns,
        ended_ns=ended_ns,
    )


def took_ns(*logs: list[Entry]) -> dict[str, int]:
    """Durations by name."""
    return {name: span.took_ns for name, span in durations_ns(logs).items()}


def test_a_duration_counts_from_the_last_arrival_to_the_first_end() -> None:
    """Whoever came first waited; that is nobody's duration. Who runs again later is late."""
    logs = [[entry("a", 10, 105)], [entry("a", 100, 115)]]
    assert durations_ns(logs) == {"a": Span(ended_ns=105, took_ns=5)}


def test_a_communication_begins_when_one_of_gloos_threads_is_free() -> None:
    """The third on a group waits for the first; its duration does not hold that."""
    log = [entry("a", 0, 100), entry("b", 1, 300), entry("c", 2, 150)]
    assert took_ns(log, log) == {"a": 100, "b": 299, "c": 50}


MESSAGE = {"is_message": True, "kind": "message of 8"}


def test_a_message_ends_where_it_is_received() -> None:
    """The sender may go on before, or wait for it much later."""
    sent = entry("m", 50, 900, **MESSAGE, receives=False)
    assert took_ns([sent], [entry("m", 20, 57, **MESSAGE)]) == {"m": 7}


def test_a_message_that_was_there_already_takes_what_others_of_its_kind_do() -> None:
    """But never longer than until it was found."""
    arrivals = {"m": 0, "n": 100, "o": 200}
    sent = [entry(n, at, at + 1, **MESSAGE, receives=False) for n, at in arrivals.items()]
    received = [
        entry("m", 0, 9, **MESSAGE),
        entry("n", 100, 190, **MESSAGE, is_exact=False),
        entry("o", 200, 203, **MESSAGE, is_exact=False),
    ]
    assert took_ns(sent, received) == {"m": 9, "n": 9, "o": 3}


def test_what_not_all_members_met_is_left_out() -> None:
    """As is what nobody waited for."""
    assert took_ns([entry("a", 0, 5), entry("b", 1, 0)], [entry("b", 1, 0)]) == {}


def test_a_program_that_waits_notices_the_end_after_gloo_does() -> None:
    """Its own time counts; a wait that came too late says less than gloo does."""
    waited = entry("a", 0, 0)
    waited.ended(10, End.NOTICED)
    waited.ended(14, End.MET)
    assert (waited.ended_ns, waited.is_met, waited.is_exact) == (14, True, True)
    waited.ended(15, End.NOTICED)
    assert waited.ended_ns == 14
    late = entry("b", 0, 0)
    late.ended(20, End.FOUND)
    assert (late.ended_ns, late.is_exact) == (20, False)


def test_a_message_has_two_ends_and_a_collective_a_group() -> None:
    """In a group of two they are the same context."""

    def call(op: CollectiveOp, *ranks: int) -> Collective:
        group = GroupHandle(group_index=0, ranks=ranks, group_rank=1, name="", backend="gloo")
        return Collective(op=op, group=group, inputs=(), outputs=(), n_bytes=8, root=0)

    assert participants(call(CollectiveOp.SEND, 7, 5, 3)) == (7, 5)
    assert participants(call(CollectiveOp.RECV, 7, 5)) == (7, 5)
    assert participants(call(CollectiveOp.ALL_REDUCE, 7, 5, 3)) == (7, 5, 3)
