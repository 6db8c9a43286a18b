"""Operators whose results follow from values are launched like any other, and cost time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from support import op_log
from support.deterministic import deterministic


def names(run: Callable[[], object]) -> list[str]:
    """Operators that ``run`` launches."""
    op_log.drain_ops()
    op_log.record_ops()
    run()
    op_log.record_ops(False)
    return [record.signature.name.removeprefix("aten::") for record in op_log.drain_ops()]


def marks() -> torch.Tensor:
    """A mask of unknown values."""
    return torch.empty(4096, device="cuda", dtype=torch.bool)


def numbers() -> torch.Tensor:
    """Unknown integers."""
    return torch.empty(4096, device="cuda", dtype=torch.int64)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: marks().nonzero(), ["nonzero"]),
        (lambda: numbers().masked_select(marks()), ["nonzero", "masked_select"]),
        (lambda: numbers().unique(), ["_unique2"]),
        (lambda: numbers().repeat_interleave(numbers()), ["repeat_interleave.Tensor"]),
        (lambda: numbers().bincount(minlength=8), ["bincount"]),
        (lambda: torch.equal(numbers(), numbers()), ["equal"]),
        (lambda: torch.randn((), device="cuda").item(), ["_local_scalar_dense"]),
        (lambda: torch.randn(8, device="cuda").isnan(), ["ne.Tensor"]),
        (lambda: torch.randn(8, device="cuda").isinf(), ["abs.out", "eq.Scalar"]),
        (
            lambda: torch.randn(8, device="cuda").isfinite(),
            ["eq.Tensor", "abs.out", "ne.Scalar", "mul.Tensor"],
        ),
    ],
)
def test_each_is_launched(run: Callable[[], object], expected: list[str]) -> None:
    """Under its own name, or as the operators that torch puts it together from."""
    launched = names(run)
    assert [name for name in launched if name in expected] == expected


def test_reading_a_number_waits_for_the_stream_and_a_transfer() -> None:
    """``item()`` is a copy to the host."""
    value = torch.randn(1 << 20, device="cuda").sum()
    op_log.drain_ops()
    op_log.record_ops()
    value.item()
    op_log.record_ops(False)
    (read,) = op_log.drain_ops()
    assert read.device_ns > 0
    assert torch.cuda.current_stream().query()


def test_finiteness_is_known_of_tensors_of_any_size() -> None:
    """A healthy run has neither infinities nor NaN."""
    values = torch.randn(1 << 16, device="cuda")
    assert values.isfinite().all().item()
    assert not values.isnan().any().item()
    assert not values.isinf().any().item()
    assert torch.tensor([1.0, float("inf")], device="cuda").isfinite().tolist() == [True, False]
    assert torch.tensor([1, 2], device="cuda").isfinite().tolist() == [True, True]


def test_peaks_hold_the_temporaries_of_a_check() -> None:
    """``isfinite`` makes the absolute values first, as on a GPU."""
    values = torch.randn(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values.isfinite()
    assert torch.cuda.max_memory_allocated() - before >= values.numel() * values.itemsize


@pytest.fixture(name="is_deterministic")
def _is_deterministic() -> Iterator[None]:
    """A program that asked for deterministic algorithms."""
    with deterministic():
        yield


@pytest.mark.usefixtures("is_deterministic")
def test_a_deterministic_program_fills_new_memory() -> None:
    """As long as the program's own fill of the same memory takes."""
    filled, own = op_log.ops_of(
        lambda: torch.empty(1 << 20, device="cuda", dtype=torch.bfloat16).fill_(1.0)
    )
    assert filled.signature.outputs == own.signature.outputs
    assert filled.device_ns == own.device_ns


@pytest.mark.usefixtures("is_deterministic")
def test_new_memory_of_each_size_and_type_has_a_cost_of_its_own() -> None:
    """And strided memory is filled like any other."""

    def make() -> None:
        torch.empty(64, device="cuda", dtype=torch.bfloat16)
        torch.empty(64, device="cuda", dtype=torch.float64)
        torch.empty_strided((8, 4), (1, 8), device="cuda", dtype=torch.uint8)

    (filled,) = zip(*(record.signature.outputs for record in op_log.ops_of(make)), strict=True)
    assert [(made.dtype, made.shape) for made in filled] == [
        ("BFloat16", (64,)),
        ("Double", (64,)),
        ("Byte", (8, 4)),
    ]


@pytest.mark.usefixtures("is_deterministic")
def test_new_memory_is_left_as_it_is_where_the_program_says_so() -> None:
    """``fill_uninitialized_memory`` off, or nothing to fill."""
    assert names(lambda: torch.empty(0, device="cuda")) == []
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]
    assert names(lambda: torch.empty(8, device="cuda")) == []
