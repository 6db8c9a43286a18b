"""Kernels that never ran and values that nobody knows, in the page and on the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from prismscale.analysis.emulated import (
    EagerRegion,
    KernelKind,
    KernelUse,
    UnknownOperator,
    ValueUse,
)
from prismscale.analysis.result import RunResult
from prismscale.cost.kernel_signature import FIELD
from prismscale.report.html import render
from prismscale.report.kernels import call_rows, call_text, coverage_sentence, kind_rows, value_rows
from prismscale.report.remarks import warnings_of
from prismscale.report.sections import run_sections
from prismscale.report.text import print_summary
from support.report_job import report_run

MM = FIELD.join(("aten::mm", "BFloat16[64,32];BFloat16[32,16]@1,32", "BFloat16[64,16]", ""))
OURS = FIELD.join(("mine::scale", "Float[8]", "Float[8]", ""))


def emulated(result: RunResult, unknown_ns: int = 1_000) -> RunResult:
    """``result`` as a null device would have given it."""
    product = KernelUse(
        signature=MM, calls=90, kind="gemm", device_ns=1_000, host_ns=9, source="scaled", error=0.2
    )
    kinds = (
        KernelKind(kind="gemm", source="scaled", calls=90, device_ns=90_000, error=0.2),
        KernelKind(kind="unknown", source="default", calls=2, device_ns=unknown_ns),
    )
    value = ValueUse(op="aten::item", call_site="train.py:3 in <b>f</b>", answer="1.0", count=2)
    return replace(
        result,
        device="null",
        kernels=kinds,
        largest_kernels=(product,),
        unknown_operators=(UnknownOperator(op="mine::scale", calls=2, device_ns=unknown_ns),),
        values=(value,),
    )


def test_calls_are_shown_with_their_shapes() -> None:
    """Element types short, transposed matrices marked; what is no signature as it is."""
    assert call_text(MM) == "mm(bf16[64, 32], bf16[32, 16]ᵀ)"
    assert call_text("mine::scale") == "mine::scale"


def test_rows_hold_share_source_and_error() -> None:
    """Of a kind, of a call, of a made-up value."""
    result = emulated(report_run()[0], unknown_ns=10_000)
    assert kind_rows(result)[0] == ("gemm", "90.0 %", "90", "90.00 µs", "scaled", "±20 %")
    assert kind_rows(result)[1][-2:] == ("default", "unknown")
    assert call_rows(result)[0][1:] == ("90.0 %", "90", "1.000 µs", "scaled", "±20 %")
    assert value_rows(result) == [("item", "train.py:3 in <b>f</b>", "1.0", "2")]


def test_operators_without_a_rule_are_named() -> None:
    """With their share, and with what to do."""
    sentence = coverage_sentence(emulated(report_run()[0], unknown_ns=10_000))
    assert "90.0 % of the kernels' time" in sentence
    assert "mine::scale (2 calls, 10.0 %)" in sentence
    assert "--kernels" in sentence


@pytest.mark.parametrize(("unknown_ns", "warned"), [(10_000, True), (100, False)])
def test_a_reader_is_warned_below_99_percent(unknown_ns: int, warned: bool) -> None:
    """Of time without a rule."""
    told = warnings_of(emulated(report_run()[0], unknown_ns))
    assert any("mine::scale" in warning for warning in told) == warned


def test_the_page_has_both_sections() -> None:
    """Escaped; and neither where a device was there."""
    result, timeline, _ = report_run()
    page = render(emulated(result), run_sections(emulated(result), timeline))
    assert "mm(bf16[64, 32], bf16[32, 16]ᵀ)" in page
    assert "train.py:3 in &lt;b&gt;f&lt;/b&gt;" in page
    titles = [section.title for section in run_sections(result, timeline)]
    assert "Kernels" not in titles
    assert "Made-up values" not in titles


def test_the_terminal_has_a_table_of_kernels() -> None:
    """Kinds and calls, within 80 columns."""
    console = Console(width=80, record=True, color_system=None)
    print_summary(emulated(report_run()[0]), console)
    shown = console.export_text()
    assert "Kernels in a step" in shown
    assert "mm(bf16[64, 32]" in shown
    assert "90.00 µs" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_regions_that_ran_eagerly_are_a_warning() -> None:
    """Named, with the reason, and no more than a reader takes in."""
    regions = [EagerRegion(region=f"Block{n}", reason="no lowering", count=2) for n in range(8)]
    result = replace(emulated(report_run()[0]), eager_regions=tuple(regions))
    warning = next(text for text in warnings_of(result) if text.startswith("Compiled regions"))

    assert "Block0 (2 times; no lowering)" in warning
    assert "and 2 more regions" in warning
