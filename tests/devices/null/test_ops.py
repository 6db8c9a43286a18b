"""The op record and the cost hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import op_log


@pytest.fixture(autouse=True)
def recording():
    op_log.drain_ops()
    op_log.record_ops()
    yield
    op_log.record_ops(False)
    op_log.set_cost_model(None)


def test_an_op_is_recorded_with_shapes_and_dtypes() -> None:
    """A matrix product is one record with its operands and its result."""
    left = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
    torch.mm(left, left.t())
    (record,) = op_log.drain_ops()

    assert record.signature.name == "aten::mm"
    assert [t.shape for t in record.signature.inputs] == [(4, 8), (8, 4)]
    assert record.signature.inputs[1].strides == (1, 8)
    assert record.signature.outputs[0] == op_log.TensorMeta(dtype="BFloat16", shape=(4, 4))


def test_views_are_not_ops() -> None:
    """Views launch nothing and record nothing."""
    tensor = torch.empty(4, 8, device="cuda")
    tensor.view(-1)[3:].unsqueeze(0).expand(5, -1)

    assert len(op_log.drain_ops()) == 0


def test_records_carry_their_stream() -> None:
    """Work in a stream context is recorded on that stream."""
    tensor = torch.empty(4, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor.add_(1)
    (record,) = op_log.drain_ops()

    assert record.stream == stream.cuda_stream


def test_a_cost_model_times_every_signature_once() -> None:
    """The model costs a signature; executions advance the stream by that cost."""
    asked: list[str] = []

    def model(signature: op_log.OpSignature) -> tuple[int, int]:
        asked.append(signature.name)
        return (1_000_000, 1_000)

    tensor = torch.empty(123, 7, device="cuda")
    op_log.set_cost_model(model)
    asked.clear()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        tensor.sin_()
    end.record()
    torch.cuda.synchronize()

    assert asked == ["aten::sin_"]
    assert start.elapsed_time(end) == pytest.approx(5.0, abs=0.01)


@pytest.mark.parametrize(
    ("copied", "blocks"),
    [
        (lambda: torch.ones(4).to("cuda"), True),
        (lambda: torch.tensor([1.0, 2.0], device="cuda"), True),
        (lambda: torch.ones(4, device="cuda").copy_(torch.ones(4)), True),
        (lambda: torch.ones(4).to("cuda", non_blocking=True), False),
        (lambda: torch.ones(4, device="cuda"), False),
        (lambda: [torch.empty(1 << 30, device="cuda"), torch.cuda.empty_cache()], False),
        (lambda: [torch.empty(1 << 30, device="cuda").numel(), torch.cuda.empty_cache()], True),
    ],
)
def test_the_host_waits_for_copies_and_to_give_memory_back(
    copied: Callable[[], object], blocks: bool
) -> None:
    """torch waits for the stream after a copy that is to block, whichever way it goes; CUDA for all
    work before it frees memory."""
    tensor = torch.empty(77, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    op_log.set_cost_model(lambda _: (1_000_000, 1_000))
    for _ in range(5):
        tensor.sinh_()
    done = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
    copied()
    # Nothing runs on the other stream: its event is as late as the host.
    host = torch.cuda.Stream().record_event(torch.cuda.Event(enable_timing=True))
    torch.cuda.synchronize()

    assert (done.elapsed_time(host) >= 0) == blocks


def test_a_launch_bound_program_takes_the_hosts_time() -> None:
    """Where the host is slower than the device, the stream waits for it."""
    tensor = torch.empty(321, device="cuda")
    op_log.set_cost_model(lambda _: (10, 50_000))
    tensor.cos_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(100):
        tensor.cos_()
    end.record()
    torch.cuda.synchronize()

    assert start.elapsed_time(end) == pytest.approx(5.0, rel=0.01)


def test_integer_arguments_are_kept() -> None:
    """Dimensions and flags that decide a kernel are in the signature."""
    torch.empty(4, 8, device="cuda").softmax(1)
    (record,) = op_log.drain_ops()

    assert record.signature.arguments["dim"] == (1,)


def test_nothing_is_recorded_when_off() -> None:
    """Without recording the log stays empty."""
    op_log.record_ops(False)
    torch.ones(3, device="cuda")

    assert len(op_log.drain_ops()) == 0


@pytest.mark.parametrize("other", [3, torch.tensor(3)], ids=["number", "tensor"])
def test_shifted_flags_are_numbers(other: Any) -> None:
    """As torch's kernels have it, and its shape rules for them do not."""
    flags = torch.ones(2, dtype=torch.bool, device="cuda")
    other = other.cuda() if isinstance(other, torch.Tensor) else other
    for shifted in (flags << other, flags >> other):
        assert (shifted.dtype, shifted.shape) == (torch.int64, (2,))
    assert (flags.int() << other).dtype == torch.int32
    with pytest.raises(RuntimeError, match="integral"):
        _ = flags.float() << other


def recorded_tf32(run: Callable[[], object]) -> list[bool]:
    """Whether the one product of ``run`` is in TF32."""
    arguments = [record.signature.arguments for record in op_log.ops_of(run)]
    return [found.get("tf32") == (1,) for found in arguments]


def test_products_are_in_tf32_where_the_program_says_so() -> None:
    """Those of 32-bit floats alone, also of a shape that was met before."""
    a = torch.ones(16, 16, device="cuda")
    half = a.bfloat16()
    assert recorded_tf32(lambda: a @ a) == [False]
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert recorded_tf32(lambda: a @ a) == [True]
        assert recorded_tf32(lambda: half @ half) == [False]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert recorded_tf32(lambda: a @ a) == [False]


def test_convolutions_are_in_tf32_unless_the_program_says_no() -> None:
    """As torch's settings are when it starts."""
    layer, x = torch.nn.Conv2d(4, 4, 3).cuda(), torch.ones(1, 4, 8, 8, device="cuda")
    assert recorded_tf32(lambda: layer(x)) == [True]
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert recorded_tf32(lambda: layer(x)) == [False]
