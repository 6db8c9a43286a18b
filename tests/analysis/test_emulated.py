"""What a device that is not there ran: the file beside a trace, and its totals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prismscale.analysis.emulated import (
    EagerRegion,
    Emulated,
    KernelUse,
    ValueUse,
    coverage,
    eager_regions,
    kernel_error,
    kernel_kinds,
    largest_kernels,
    unknown_operators,
    value_uses,
)
from prismscale.cost.kernel_signature import FIELD
from prismscale.errors import FormatError


def use(kind: str = "gemm", calls: int = 1, device_ns: int = 100, error: float = 0.1) -> KernelUse:
    return KernelUse(
        signature="aten::mm",
        calls=calls,
        kind=kind,
        device_ns=device_ns,
        host_ns=5,
        source="modelled",
        error=error,
    )


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    """Kernels and values, as written."""
    value = ValueUse(op="aten::item", call_site="train.py:3 in f", answer="1.0", count=2)
    emulated = Emulated(kernels=(use(),), values=(value,))
    emulated.save(tmp_path / "rank-0.null.json")
    assert Emulated.load(tmp_path / "rank-0.null.json") == emulated


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(FormatError, match=r"bad\.json"):
        Emulated.load(tmp_path / "bad.json")


def test_kinds_add_up_over_ranks() -> None:
    """Calls and device time of each kind, longest first."""
    kinds = kernel_kinds(
        [Emulated(kernels=(use(calls=2), use("copy"))), Emulated(kernels=(use(),))]
    )
    assert [(k.kind, k.calls, k.device_ns) for k in kinds] == [("gemm", 3, 300), ("copy", 1, 100)]


def test_what_graphs_replay_costs_the_host_nothing() -> None:
    """Of four calls on two ranks three are the host's."""
    replayed = replace(use(calls=3), replayed=1)
    ranks = [Emulated(kernels=(replayed,)), Emulated(kernels=(use(),))]
    (kind,) = kernel_kinds(ranks)
    (largest,) = largest_kernels(ranks)
    assert kind.host_ns == 3 * use().host_ns
    assert (largest.calls, largest.replayed) == (4, 1)


def test_the_largest_calls_are_those_of_all_ranks() -> None:
    """Calls of one signature count together; longest first, as many as asked for."""
    small = replace(use("copy", device_ns=1), signature="aten::copy_")
    ranks = [Emulated(kernels=(small, use(calls=2))), Emulated(kernels=(use(),))]
    (found,) = largest_kernels(ranks, most=1)
    assert (found.signature, found.calls) == ("aten::mm", 3)


def test_what_has_no_rule_is_listed_by_operator() -> None:
    """Whatever its shapes; the rest is covered."""
    unknown = [
        replace(use("unknown"), signature=f"mine::scale{FIELD}Float[{n}]", source="default")
        for n in (4, 8)
    ]
    ranks = [Emulated(kernels=(use(calls=8), *unknown))]
    (found,) = unknown_operators(ranks)
    assert (found.op, found.calls, found.device_ns) == ("mine::scale", 2, 200)
    assert coverage(kernel_kinds(ranks)) == pytest.approx(0.8)


def test_errors_are_weighted_by_time() -> None:
    """As if all kernels erred alike; unknown where most of the time is."""
    assert kernel_error([use(error=0.1), use(calls=3, error=0.3)]) == pytest.approx(0.25)
    assert kernel_error([use(error=0.1), use(error=-1.0)]) < 0


def test_equal_questions_are_counted_together() -> None:
    """The same line of the same program, on every rank."""
    value = ValueUse(op="aten::item", call_site="train.py:3 in f", answer="1.0", count=2)
    assert value_uses([Emulated(values=(value,)), Emulated(values=(value,))])[0].count == 4


def test_regions_that_ran_eagerly_are_counted_over_ranks() -> None:
    """The same region for the same reason is one."""
    region = EagerRegion(region="Block", reason="Triton is missing", count=2)
    other = replace(region, reason="unsupported")
    ranks = [Emulated(eager_regions=(other, region)), Emulated(eager_regions=(region,))]

    assert eager_regions(ranks) == (replace(region, count=4), other)
