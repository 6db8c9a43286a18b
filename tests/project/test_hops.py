"""Which files a communication passes through: the tables of ``docs/how-it-works.md``."""

from __future__ import annotations

import re
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
from support.traces import loop_trace

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
SOURCE = "/src/prismscale/"
WORLD = 4


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


@pytest.mark.parametrize(("way", "most"), [(captured, 20), (live, 26)], ids=["captured", "live"])
def test_the_page_lists_the_files_that_an_all_reduce_passes(
    way: Callable[[Path], list[str]], most: int, tmp_path: Path
) -> None:
    """All of them, in order, and no more than a reader can follow."""
    found = way(tmp_path)
    heading = f"### An `all_reduce` of a {way.__name__} rank"
    section = PAGE.read_text().partition(heading)[2].partition("\n#")[0]
    assert re.findall(r"^\d+\. `([\w/.]+)`", section, re.MULTILINE) == found
    assert len(found) <= most
