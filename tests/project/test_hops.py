"""Which files a communication and a figure pass through: the lists of ``docs/how-it-works.md``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import distributed as dist

from prismscale.capture.recorder import Recorder
from prismscale.devices.cpu import CpuDevice
from prismscale.emulation.hook import CommunicationHook, GroupObserver
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.host_comm.local_work import NullLoad
from prismscale.live.clock import VirtualClock
from prismscale.live.coordinator.wire import Message, MessageKind
from prismscale.live.exchange import Exchange
from prismscale.live.host_hook import LiveHook
from prismscale.live.overlap import Overlap
from prismscale.live.trace_cursor import TraceCursor
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.chain import rank_payload
from support.runs import command, environment, write_program
from support.traces import loop_trace

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
SOURCE = "/src/prismscale/"
PACKAGE = Path(__file__).parents[2] / "src" / "prismscale"
WORLD = 4
HELD_BYTES = 50 << 30
"""No other figure of a small program is as large."""
HOLDER = f"""
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(6):
    held = torch.empty({HELD_BYTES}, dtype=torch.uint8, device="cuda")
    model(torch.ones(8, 8, device="cuda")).sum().backward()
    del held
    optimizer.step()
    optimizer.zero_grad()
"""


def files_entered(call: Callable[[], object]) -> list[str]:
    """Files of the package whose functions ``call`` runs, in order of the first time."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        _, ours, name = frame.f_code.co_filename.partition(SOURCE)
        if event == "call" and ours:
            found.setdefault(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(found)


def of_an_all_reduce(hook: CommunicationHook, observer: GroupObserver) -> list[str]:
    """Issued and waited for by rank 1 of four."""
    environment = RankEnvironment(rank=1, world_size=WORLD, local_world_size=WORLD)
    with absent_peers(environment, hook, observer):
        dist.init_process_group("gloo")
        tensor = torch.ones(1)

        def reduce() -> None:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()

        # What is looked up once is not on the way of each.
        reduce()
        return files_entered(reduce)


class Coordinator:
    """Releases everything as it arrives."""

    def __init__(self) -> None:
        self._last = 0

    def send(self, message: Message) -> None:
        """Note the position."""
        self._last = message.position

    def receive(self, timeout_s: float | None) -> list[Message]:
        """It ended."""
        return [Message(MessageKind.RELEASE, self._last, 0)]


def captured(folder: Path) -> list[str]:
    """On a rank that is recorded."""
    recorder = Recorder(CpuDevice(), rank_payload(folder, None))
    return of_an_all_reduce(recorder, recorder)


def live(folder: Path) -> list[str]:
    """On a live rank, in its own process."""
    trace = loop_trace(WORLD, 4)
    hook = LiveHook(
        cursor=TraceCursor(trace),
        wire=Coordinator(),  # type: ignore[arg-type]
        clock=VirtualClock(0),
        payload=rank_payload(folder, None),
        exchange=Exchange(folder=folder, rank=1, live=frozenset({1})),
        load=NullLoad(),
        overlap=Overlap(trace),
        compute_factor=1.0,
    )
    return of_an_all_reduce(hook, hook)


def listed(heading: str) -> list[str]:
    """The lines of a numbered list of the page, without their numbers."""
    section = PAGE.read_text().partition(f"### {heading}")[2].partition("\n#")[0]
    return re.findall(r"^\d+\. (.*)", section, re.MULTILINE)


def files_of(lines: list[str]) -> list[str]:
    """The files that some lines begin with."""
    return [line.split("`")[1] for line in lines]


@pytest.mark.parametrize(("way", "most"), [(captured, 21), (live, 26)], ids=["captured", "live"])
def test_the_page_lists_the_files_that_an_all_reduce_passes(
    way: Callable[[Path], list[str]], most: int, tmp_path: Path
) -> None:
    """All of them, in order, and no more than a reader can follow."""
    found = way(tmp_path)
    assert files_of(listed(f"An `all_reduce` of a {way.__name__} rank")) == found
    assert len(found) <= most


ALLOCATION = "An allocation on the null device"


def files_with_the_peak(folder: Path) -> list[str]:
    """Files of the package that have the peak of a run at hand, in order of the first time, until
    it is written."""
    notes = folder / "hops"
    watching = Path(__file__).parents[1] / "support" / "figure_hops"
    given = environment()
    given |= {
        "PYTHONPATH": f"{watching}{os.pathsep}{given['PYTHONPATH']}",
        "HOPS_FILE": str(notes),
        "HOPS_LEAST": str(HELD_BYTES),
        "HOPS_BELOW": str(HELD_BYTES + (1 << 30)),
    }
    options = ("--device", "null", "--world-size", 1, "--watch-steps", 0, "--out", folder / "run")
    program = write_program(folder / "program", HOLDER)
    subprocess.run(command("run", *options, program), env=given, check=True, capture_output=True)
    lines = sorted(notes.read_text().splitlines(), key=lambda line: int(line.split()[0]))
    found = list(dict.fromkeys(line.split()[1] for line in lines))
    return found[: found.index("files.py") + 1]


def test_the_page_lists_the_files_that_an_allocation_passes(tmp_path: Path) -> None:
    """Those in Python: all of them, in order. With those of the extension they are few."""
    files = files_of(listed(ALLOCATION))
    assert [name for name in files if name.endswith(".py")] == files_with_the_peak(tmp_path)
    assert len(files) <= 20


def test_functions_of_the_extension_are_where_the_page_says() -> None:
    """Nobody traces calls within it: each is named with its file, before what is in Python."""
    lines = [line for line in listed(ALLOCATION) if not line.split("`")[1].endswith(".py")]
    assert lines == listed(ALLOCATION)[: len(lines)]
    for line in lines:
        _, name, _, function, *_ = line.split("`")
        assert re.search(rf"\b{re.escape(function)}\(", (PACKAGE / name).read_text()), line
