"""What-ifs as a live rank feels them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from prismscale.config import JobConfig
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.emulation.hook import GroupHandle
from prismscale.emulation.script import Script
from prismscale.emulation.step_detection import watch_backward, watch_recomputation
from prismscale.errors import UsageError
from prismscale.live.hoped_hook import HopedHook, LeftOut, OneStream, Phases
from prismscale.payload.mirror import MirrorPayload
from support.emulation import RecordingHook, all_reduce

DATA = GroupHandle(group_index=1, ranks=(0, 1), group_rank=0, name="mesh_dp", backend="nccl")
NAMELESS = GroupHandle(group_index=2, ranks=(0, 1), group_rank=0, name="", backend="nccl")


class Streams:
    """Notes when the computing stream and the current one are put in order."""

    def __init__(self, answering: RecordingHook) -> None:
        self._answering = answering
        self.seen: list[tuple[str, int, int]] = []

    def before(self) -> None:
        """With how many batches were issued and waited for by then."""
        self._note("before")

    def after(self) -> None:
        """The same."""
        self._note("after")

    def _note(self, what: str) -> None:
        answering = self._answering
        self.seen.append((what, len(answering.batches), len(answering.n_issued_at_wait)))


def felt(*texts: str) -> tuple[HopedHook, RecordingHook, Streams]:
    """A live rank's hook with what-ifs."""
    answering = RecordingHook()
    streams = Streams(answering)
    hook = HopedHook(
        answering=answering, payload=MirrorPayload(), hoped=WhatIfs.parse(texts), stream=streams
    )
    return hook, answering, streams


def test_a_blocking_communication_is_waited_for_at_once() -> None:
    """The computing stream is before it when it is issued, and after it when it has ended."""
    hook, answering, streams = felt("overlap=dp off")
    hook.communicate([all_reduce(DATA, asynchronous=True)])
    assert streams.seen == [("before", 0, 0), ("after", 1, 1)]
    assert answering.n_issued_at_wait == [1]


@pytest.mark.parametrize("what_if", ["overlap=tp off", "link=network x2"])
def test_other_groups_are_waited_for_when_the_program_does(what_if: str) -> None:
    """Their streams are nobody's affair."""
    hook, answering, streams = felt(what_if)
    work = hook.communicate([all_reduce(DATA, asynchronous=True)])
    assert (answering.n_issued_at_wait, streams.seen) == ([], [])
    work.wait()
    assert answering.n_issued_at_wait == [1]


def test_a_group_without_a_name_is_meant_by_its_number() -> None:
    """As in results."""
    hook, answering, _ = felt("overlap=group 2 off")
    hook.communicate([all_reduce(NAMELESS, asynchronous=True)])
    assert answering.n_issued_at_wait == [1]


def test_what_is_left_out_is_nobodys_communication() -> None:
    """Its outputs are defined all the same."""
    hook, answering, _ = felt("recompute=off")
    hook.leaves_out = True
    collective = all_reduce(DATA)
    hook.communicate([collective]).wait()
    assert answering.batches == []
    assert collective.outputs[0].tolist() == [2.0]


@pytest.mark.parametrize("is_steady", [True, False])
def test_a_steady_step_computes_nothing_again(is_steady: bool) -> None:
    """Between the two calls all is free; the steps before are as they were captured."""
    hook, answering, _ = felt("recompute=off")
    free: list[int] = []
    left = LeftOut(hook=hook, is_steady=lambda: is_steady, without_cost=free.append)
    x = torch.ones(2, requires_grad=True)

    def part(y: torch.Tensor) -> torch.Tensor:
        hook.communicate([all_reduce(DATA)])
        return y * y

    with watch_recomputation(left):
        checkpoint(part, x, use_reentrant=False).sum().backward()
    assert free == ([1, 0] if is_steady else [])
    assert len(answering.batches) == (1 if is_steady else 2)
    assert not hook.leaves_out


class Factors:
    """A hook that notes the factors on what is computed."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def enter_phase(self, factor: float) -> None:
        """Note it."""
        self.seen.append(factor)


def test_phases_take_their_factors() -> None:
    """Forward, backward, forward, optimizer, forward; two what-ifs on one phase multiply."""
    hook = Factors()
    hoped = WhatIfs.parse(["kernel=backward x3", "kernel=.*ward x0.5", "kernel=optimizer x7"])
    phases = Phases(hook=hook, hoped=hoped)  # type: ignore[arg-type]
    with watch_backward(phases):
        torch.ones(2, requires_grad=True).sum().backward()
    phases.optimizer_begins()
    phases.optimizer_ended()
    assert hook.seen == [0.5, 1.5, 0.5, 7.0, 0.5]


def job(device: str, *what_ifs: str, live: tuple[int, ...] = (0,)) -> JobConfig:
    """A job of two ranks."""
    return JobConfig(
        script=Script(target=__file__),
        world_size=2,
        cluster="h100-sxm",
        out=Path("run"),
        live=live,
        device=device,
        what_ifs=what_ifs,
    )


@pytest.mark.parametrize("what_if", ["kernel=mm x2", "overlap=dp off", "recompute=off"])
def test_a_live_rank_on_a_gpu_computes_as_it_does(what_if: str) -> None:
    """So what it would have to feel is refused; its peers' links may change."""
    with pytest.raises(UsageError, match="--device cuda"):
        job("cuda", what_if)
    assert job("cuda", what_if, live=()).what_ifs == (what_if,)
    assert job("cuda", "link=network x2").what_ifs == ("link=network x2",)


@pytest.mark.parametrize("device", ["cpu", "null"])
@pytest.mark.parametrize("what_if", ["links=shared", "compute=shared"])
def test_live_ranks_do_not_know_what_runs_beside_what(what_if: str, device: str) -> None:
    """A simulated step does."""
    with pytest.raises(UsageError, match="Leave out --live"):
        job(device, what_if)
    assert job(device, what_if, live=()).what_ifs == (what_if,)


def test_what_means_nothing_is_refused_before_anything_runs() -> None:
    """By the job itself."""
    with pytest.raises(UsageError, match="above 0"):
        job("cpu", "link=network x0")


def test_a_processor_has_one_stream() -> None:
    """There is nothing to put in order."""
    answering = RecordingHook()
    hook = HopedHook(
        answering=answering,
        payload=MirrorPayload(),
        hoped=WhatIfs.parse(["overlap=dp off"]),
        stream=OneStream(),
    )
    hook.communicate([all_reduce(DATA, asynchronous=True)])
    assert answering.n_issued_at_wait == [1]
