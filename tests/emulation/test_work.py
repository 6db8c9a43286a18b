"""Handles of emulated communications: when they complete, and who finds out."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

from prismscale.emulation import work
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.work import EmulatedWork, completed, in_flight
from prismscale.graph.node import CollectiveOp


class _Waits:
    def __init__(self) -> None:
        self.timeouts: list[timedelta | None] = []

    def __call__(self, timeout: timedelta | None) -> None:
        self.timeouts.append(timeout)


def test_completed_work_has_its_outputs() -> None:
    """A completed communication answers every query at once."""
    x = torch.ones(2)
    done = completed([x])
    assert done.wait()
    assert done.is_completed()
    assert done.result()[0] is x
    assert done.get_future().value()[0] is x


def test_only_the_first_wait_waits() -> None:
    """on_wait is called once, with the timeout of the first wait."""
    waits = _Waits()
    pending = EmulatedWork((), waits)
    pending.wait(timedelta(seconds=3))
    pending.wait()
    pending.block_current_stream()
    assert waits.timeouts == [timedelta(seconds=3)]


def test_nobody_finds_completed_what_another_thread_still_waits_for() -> None:
    """A second waiter returns when the first does, and polls say no until then."""
    waiting, arrives = threading.Event(), threading.Event()
    x = torch.zeros(1)

    def on_wait(_: timedelta | None) -> None:
        waiting.set()
        arrives.wait()
        x.fill_(7.0)

    pending = EmulatedWork([x], on_wait)
    heard: list[float] = []
    threads = [threading.Thread(target=pending.wait)]
    threads.append(threading.Thread(target=lambda: heard.append(pending.result()[0].item())))
    threads[0].start()
    waiting.wait()
    threads[1].start()
    assert not pending.is_completed()
    arrives.set()
    for thread in threads:
        thread.join()
    assert heard == [7.0]
    assert pending.is_completed()


def test_polling_does_not_wait() -> None:
    """is_completed asks is_done and leaves waiting to wait."""
    waits, answers = _Waits(), iter([False, True])
    pending = EmulatedWork((), waits, lambda: next(answers))
    assert [pending.is_completed(), pending.is_completed()] == [False, True]
    assert waits.timeouts == []


def test_future_settles_when_waited_for() -> None:
    """Taking a future does not wait; waiting for it does."""
    waits = _Waits()
    x = torch.ones(2)
    future = EmulatedWork([x], waits).get_future()
    assert waits.timeouts == []
    assert future.wait()[0] is x
    assert len(waits.timeouts) == 1


def test_waiting_for_the_work_settles_the_future() -> None:
    """A callback chained to the future runs when the work is waited for."""
    pending = EmulatedWork([torch.ones(1)], _Waits())
    seen: list[Any] = []
    pending.get_future().add_done_callback(lambda future: seen.append(future.value()))
    assert seen == []
    pending.wait()
    assert len(seen) == 1


def test_chained_future_settles_its_parent() -> None:
    """Waiting for what then() gave waits for the communication, and passes errors on."""
    waits = _Waits()
    future = EmulatedWork([torch.ones(1)], waits).get_future()
    doubled = future.then(lambda parent: parent.value()[0] * 2)
    failing = doubled.then(lambda parent: 1 / 0)
    assert waits.timeouts == []
    assert doubled.wait().item() == 2
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert len(waits.timeouts) == 1


def test_future_in_a_backward_pass_settles_at_its_end() -> None:
    """A future that nobody waits for in Python completes when the backward pass ends."""
    waits = _Waits()
    order: list[str] = []

    def hook(grad: torch.Tensor) -> None:
        pending = EmulatedWork([grad], lambda timeout: order.append("settled"))
        pending.get_future().add_done_callback(lambda future: order.append("done"))
        order.append("issued")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert order == ["issued", "settled", "done"]
    assert waits.timeouts == []


def test_futures_can_be_collected() -> None:
    """collect_all and wait_all settle what they collect."""
    waits = _Waits()
    futures = [EmulatedWork([torch.ones(1)], waits).get_future() for _ in range(3)]
    together = work.collect_all(futures[:2])
    assert waits.timeouts == []
    assert len(together.wait()) == 2
    assert len(work.wait_all(futures)) == 3
    assert len(waits.timeouts) == 3


def test_poll_of_a_future_completes_it() -> None:
    """done() is the way out of a polling loop."""
    answers = iter([False, True])
    future = EmulatedWork([torch.ones(1)], _Waits(), lambda: next(answers)).get_future()
    assert [future.done(), future.done()] == [False, True]


def test_receive_names_its_source() -> None:
    """source_rank answers the sender of a receive."""
    assert EmulatedWork((), source=3).source_rank() == 3


def _batch(op: CollectiveOp, backend: str) -> list[Collective]:
    group = GroupHandle(ranks=(0, 1), group_rank=0, group_index=0, name="world", backend=backend)
    sent, received = (torch.ones(4),), (torch.ones(8),)
    outputs = () if op == CollectiveOp.SEND else received
    return [
        Collective(op=op, group=group, inputs=sent, outputs=outputs, n_bytes=32, asynchronous=True)
    ]


@pytest.mark.parametrize(
    ("backend", "op", "waited", "inputs_live"),
    [
        ("gloo", CollectiveOp.ALL_GATHER, True, True),
        ("nccl", CollectiveOp.ALL_GATHER, False, True),
        ("nccl", CollectiveOp.ALL_GATHER, True, False),
        ("nccl", CollectiveOp.SEND, True, True),
    ],
)
def test_a_handle_keeps_what_the_backend_keeps(
    backend: str, op: CollectiveOp, waited: bool, inputs_live: bool
) -> None:
    """gloo holds inputs as long as the handle lives, NCCL until the wait; a message for longer."""
    batch = _batch(op, backend)
    sent = weakref.ref(batch[0].inputs[0])
    pending = in_flight(batch, _Waits())
    del batch
    if waited:
        pending.wait()

    assert (sent() is not None) == inputs_live
    del pending
    assert sent() is None


def test_a_waited_handle_lets_go_of_its_poll() -> None:
    """What answers polls may hold the whole communication."""

    class Poll:
        def __call__(self) -> bool:
            return False

    poll = Poll()
    gone = weakref.ref(poll)
    pending = EmulatedWork((), _Waits(), poll)
    del poll
    pending.wait()

    assert gone() is None
    assert pending.is_completed()
