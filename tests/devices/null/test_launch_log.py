"""The launch log: what a capture's nodes are made of, costed anew without another capture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from span_programs import DEPTH, MOST_NS, PROGRAM, Condensed, observed
from torch.utils.checkpoint import checkpoint

from prismscale.capture.node_stream import NodeStream
from prismscale.cost.kernel import KernelCost, KernelModel, load_kernel_model
from prismscale.cost.launch_log import (
    LaunchLog,
    NodePath,
    RecomputedPart,
    costs,
    load_launch_log,
    recost,
    save_launch_log,
)
from prismscale.devices.null.condensed_spans import NOT_HELD
from prismscale.devices.null.device import NullDevice
from prismscale.devices.null.kernel_ledger import KernelLedger
from prismscale.devices.null.launch_reader import RecomputedParts, launch_log
from prismscale.devices.null.runtime import active
from prismscale.emulation.step_detection import watch_recomputation
from prismscale.errors import FormatError
from prismscale.graph.node import NodeKind

DEVICE_NS_S = np.repeat(np.arange(MOST_NS + 1), MOST_NS + 1)
HOST_NS_S = np.tile(np.arange(MOST_NS + 1), MOST_NS + 1)
"""Costs of the calls of :mod:`span_programs`."""


def recorded(
    steps: list[tuple[Any, ...]], slowness: int = 1, is_busy: bool = False
) -> tuple[Condensed, LaunchLog]:
    """A program on the null device, and the log of its launches."""
    condensed = Condensed(slowness, is_busy)
    condensed.library.ps_set_launch_queue_depth(DEPTH)
    condensed.run(observed(steps))
    condensed.spans.close()
    condensed.library.ps_set_launch_queue_depth(active().spec.launch_queue_depth)
    return condensed, launch_log(condensed.library)


def durations_ns(stream: NodeStream, log: LaunchLog) -> list[int]:
    """Of the log's nodes, as recorded."""
    return [stream.nodes[n].ended - stream.nodes[n].began for n in log.node_N.tolist()]


@settings(deadline=None, max_examples=300)
@given(PROGRAM, st.booleans())
def test_the_prices_of_a_capture_give_its_durations(
    steps: list[tuple[Any, ...]], is_busy: bool
) -> None:
    """Of every node that is computation, to the nanosecond; also where streams take turns."""
    condensed, log = recorded(steps, is_busy=is_busy)
    kinds = [node.kind for node in condensed.nodes.nodes]
    assert log.node_N.tolist() == [n for n, k in enumerate(kinds) if k == NodeKind.COMPUTE]
    assert recost(log, DEVICE_NS_S, HOST_NS_S).tolist() == durations_ns(condensed.nodes, log)


@settings(deadline=None, max_examples=200)
@given(PROGRAM)
def test_other_prices_give_the_durations_of_another_capture(steps: list[tuple[Any, ...]]) -> None:
    """One in which every launch takes twice as long."""
    _, log = recorded(steps)
    slow, slow_log = recorded(steps, slowness=2)
    assert log.node_N.tolist() == slow_log.node_N.tolist()
    assert recost(log, 2 * DEVICE_NS_S, 2 * HOST_NS_S).tolist() == durations_ns(slow.nodes, log)


@dataclass(frozen=True)
class Slow:
    """Costs of an H100 that is slower by a factor."""

    factor: int

    def cost(self, signature: str) -> KernelCost:
        """The model's figure times the factor."""
        cost = load_kernel_model("h100-sxm").cost(signature)
        return replace(
            cost, device_ns=self.factor * cost.device_ns, host_ns=self.factor * cost.host_ns
        )


def trained(model: KernelModel) -> tuple[NodeStream, LaunchLog]:
    """Three steps of a small model on two streams, recorded as a capture does."""
    runtime, stream = active(), NodeStream()
    ledger = KernelLedger(runtime, model)
    spans = NullDevice(runtime).spans(stream, "forward")
    net = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = torch.randn(8, 128, 256, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        loss = net(x).square().mean()
        spans.label = "backward"
        loss.backward()
        spans.label = NOT_HELD
        optimizer.step()
        optimizer.zero_grad()
        spans.label = "forward"
        stream.mark()
        ledger.optimizer_ended()
        torch.cuda.synchronize()
    spans.close()
    return stream, launch_log(runtime.library)


def test_a_training_run_is_priced_anew() -> None:
    """With its own costs to the nanosecond; with doubled ones as a capture that has these."""
    stream, log = trained(Slow(1))
    log = log.for_trace(prologue_stop=len(stream.nodes), body_start=0, body_stop=0)
    slow_stream, slow_log = trained(Slow(2))
    model = load_kernel_model("h100-sxm")
    assert recost(log, *costs(log, model)).tolist() == durations_ns(stream, log)
    assert log.node_N.tolist() == slow_log.node_N.tolist()
    doubled = recost(log, *costs(log, model, slowness=2.0)).tolist()
    assert doubled == durations_ns(slow_stream, log)


def test_the_log_of_a_trace_counts_its_nodes() -> None:
    """A prologue of the first step, the third step as body; the second one's nodes are left out."""
    stream, whole = trained(Slow(1))
    first, second, third = stream.marks
    log = whole.for_trace(prologue_stop=first, body_start=second, body_stop=third)
    assert log.node_N.max() < first + third - second
    expected = [n for n in whole.node_N.tolist() if n < first or second <= n < third]
    assert [n if n < first else n - first + second for n in log.node_N.tolist()] == expected
    durations = recost(log, *costs(log, load_kernel_model("h100-sxm")))
    assert durations.tolist() == [stream.nodes[n].ended for n in expected]
    assert len(log.signatures) < len(whole.signatures)
    body = whole.for_trace(prologue_stop=0, body_start=second, body_stop=third)
    assert body.n_entries < log.n_entries / 2
    in_body = log.node_N >= first
    own = recost(body, *costs(body, load_kernel_model("h100-sxm")))
    assert own.tolist() == durations[in_body].tolist()


def test_what_the_host_does_by_itself_is_in_the_log() -> None:
    """A program that asks whether an event is done pays for it, whatever its kernels cost."""
    condensed = Condensed()
    condensed.launch(0, 9, 5)
    event = condensed.cuda[0].record_event()
    condensed.library.ps_advance_host(2**31 + 7)
    assert event.query()
    condensed.communicate(0, 0, False)
    log = launch_log(condensed.library)
    assert log.stated_ns_E.tolist() == [0, 2**31 - 1, 8]
    host = recost(log, DEVICE_NS_S, HOST_NS_S)[log.path_N == NodePath.HOST]
    assert host.sum() == 5 + 2**31 + 7


def logged() -> LaunchLog:
    """A small log."""
    condensed, log = recorded([("launch", 0, 3, 2), ("launch", 1, 4, 2), ("launch", 0, 1, 7)])
    log = replace(log, signatures=tuple(f"call {number}" for number in range(len(DEVICE_NS_S))))
    return log.for_trace(prologue_stop=2, body_start=2, body_stop=len(condensed.nodes.nodes))


def part(first_entry: int, stop_entry: int, first_node: int, stop_node: int) -> RecomputedPart:
    """What is computed a second time."""
    return RecomputedPart(
        first_entry=first_entry, stop_entry=stop_entry, first_node=first_node, stop_node=stop_node
    )


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All columns, and the text of each signature."""
    log = replace(logged(), recomputed=(part(0, 1, 0, 2), part(1, 1, 2, 2)))
    save_launch_log(log, tmp_path / "log.parquet")
    read = load_launch_log(tmp_path / "log.parquet")
    assert (read.signatures, read.recomputed) == (log.signatures, log.recomputed)
    for name in LaunchLog.__dataclass_fields__:
        if name not in ("signatures", "recomputed"):
            np.testing.assert_array_equal(getattr(read, name), getattr(log, name))


def changed(values: NDArray[Any], place: int, value: int) -> NDArray[Any]:
    """A copy with one other number."""
    values = values.copy()
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("signature_E", 0, 999),
        ("signature_E", 0, -1),
        ("lane_E", 0, -2),
        ("stated_ns_E", 0, -1),
        ("node_N", 1, 0),
        ("path_N", 0, 3),
        ("lane_N", 0, -1),
        ("since_N", -1, 99),
        ("first_N", -1, 99),
        ("stop_N", 0, -1),
    ],
)
def test_a_file_that_recosting_could_stumble_over_is_refused(
    tmp_path: Path, name: str, place: int, value: int
) -> None:
    """Numbers out of range, or that contradict each other."""
    log = logged()
    path = tmp_path / "log.parquet"
    save_launch_log(replace(log, **{name: changed(getattr(log, name), place, value)}), path)
    with pytest.raises(FormatError, match=r"log\.parquet"):
        load_launch_log(path)


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    """A log whose entries lack a lane."""
    path = tmp_path / "log.parquet"
    log = logged()
    save_launch_log(replace(log, lane_E=log.lane_E[:-1]), path)
    with pytest.raises(FormatError, match="differ in length"):
        load_launch_log(path)


@pytest.mark.parametrize("wrong", [part(2, 1, 0, 0), part(0, 0, 3, 2), part(-1, 0, 0, 0)])
def test_a_part_that_ends_before_it_begins_is_refused(
    tmp_path: Path, wrong: RecomputedPart
) -> None:
    """As other numbers that contradict each other."""
    path = tmp_path / "log.parquet"
    save_launch_log(replace(logged(), recomputed=(wrong,)), path)
    with pytest.raises(FormatError, match="recomputed"):
        load_launch_log(path)


CHECKPOINTED = ("none", "reentrant", "not reentrant")


def checkpointed(how: str) -> tuple[NodeStream, LaunchLog]:
    """Three steps of a small model, a part of which is computed again."""
    runtime, stream = active(), NodeStream()
    ledger = KernelLedger(runtime, Slow(1))
    device, found = NullDevice(runtime), list[RecomputedPart]()
    spans = device.spans(stream, "forward")
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device="cuda") for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters())
    with watch_recomputation(RecomputedParts(runtime.library, device, found)):
        for _ in range(3):
            x = torch.randn(256, 512, device="cuda", requires_grad=True)
            if how == "none":
                y = net(x)
            else:
                y = checkpoint(net, x, use_reentrant=how == "reentrant", preserve_rng_state=False)
            y.square().mean().backward()
            spans.label = NOT_HELD
            optimizer.step()
            optimizer.zero_grad()
            spans.label = "forward"
            stream.mark()
            ledger.optimizer_ended()
            torch.cuda.synchronize()
    spans.close()
    return stream, launch_log(runtime.library, found)


def body_of(stream: NodeStream, log: LaunchLog) -> LaunchLog:
    """Of the last step."""
    _, second, third = stream.marks
    return log.for_trace(prologue_stop=0, body_start=second, body_stop=third)


@pytest.mark.parametrize("how", CHECKPOINTED[1:])
def test_what_a_backward_pass_computes_again_can_be_left_out(how: str) -> None:
    """Then it takes as many matrix products, and as long, as without checkpointing."""
    again, plain = (body_of(*checkpointed(one)) for one in (how, "none"))
    model = load_kernel_model("h100-sxm")
    products = np.array([s.startswith("aten::addmm") for s in again.signatures])
    launched_E = again.signature_E >= 0
    is_product_E = np.zeros(again.n_entries, dtype=bool)
    is_product_E[launched_E] = products[again.signature_E[launched_E]]
    # Without reentrance it stops where all that was missing is there again.
    twice = 4 if how == "reentrant" else 3
    assert is_product_E.sum() == 4 + twice
    assert (is_product_E & again.is_recomputed_E).sum() == twice
    work = {}
    for name, log, recomputes in (("left out", again, False), ("never", plain, True)):
        durations = recost(log, *costs(log, model), recomputes=recomputes)
        work[name] = int(durations[log.path_N == NodePath.WORK].sum())
    assert work["left out"] == work["never"]
    everything = recost(again, *costs(again, model))
    assert int(everything[again.path_N == NodePath.WORK].sum()) > work["never"]


def test_without_checkpointing_nothing_is_computed_again() -> None:
    """Gradients that are enabled outside of a backward pass are none of it."""
    with torch.enable_grad():
        _, log = checkpointed("none")
    assert log.recomputed == ()
