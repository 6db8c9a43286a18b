"""Kernels at hoped-for costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prismscale.cluster import Calibration, Cluster
from prismscale.cost.kernel import KernelModel, load_kernel_model
from prismscale.cost.kernel_changes import (
    ChangedKernels,
    HostFactor,
    KernelChange,
    KernelFactor,
    ProductDtype,
    changed_kernels,
)
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.cost.kernel_signature import FIELD
from prismscale.errors import UsageError

H100 = load_kernel_model("h100-sxm")


def signature(name: str, inputs: str, outputs: str = "", arguments: str = "") -> str:
    """As the null device writes it."""
    return FIELD.join((name, inputs, outputs, arguments))


PRODUCT = signature("aten::mm", "BFloat16[4096,4096];BFloat16[4096,4096]", "BFloat16[4096,4096]")
ODD = signature("aten::mm", "BFloat16[4096,4095];BFloat16[4095,4096]", "BFloat16[4096,4096]")
FP8 = signature(
    "aten::mm", "Float8_e4m3fn[4096,4096];Float8_e4m3fn[4096,4096]", "BFloat16[4096,4096]"
)
BIASED = signature(
    "aten::addmm",
    "BFloat16[4096];BFloat16[4096,4096];BFloat16[4096,4096]@1,4096",
    "BFloat16[4096,4096]",
)
LIBRARY = signature(
    "transformer_engine::generic_gemm.gemm", "", "", "extents=1,4096,4096,4096;launches=1;bits=16"
)
ADD = signature("aten::add.Tensor", "Float[1024];Float[1024]", "Float[1024]")
VIEW = signature("aten::view", "Float[1024]", "Float[1024]")


def with_change(change: KernelChange) -> KernelModel:
    """An H100 with one change."""
    return ChangedKernels(model=H100, change=change)


@pytest.mark.parametrize("pattern", ["gemm", "mm", "aten::mm", "g.*", "gemm|attention"])
def test_a_pattern_names_a_kind_or_an_operator(pattern: str) -> None:
    """All of its name, not a part."""
    changed = with_change(KernelFactor(pattern=pattern, factor=0.5)).cost(PRODUCT)
    assert changed.device_ns == round(H100.cost(PRODUCT).device_ns * 0.5)


@pytest.mark.parametrize("pattern", ["gem", "m", "add", "attention.*"])
def test_what_a_pattern_does_not_name_costs_what_it_did(pattern: str) -> None:
    """To the last field."""
    assert with_change(KernelFactor(pattern=pattern, factor=0.5)).cost(PRODUCT) == H100.cost(
        PRODUCT
    )


def test_a_kind_of_two_words_is_named_as_reports_show_it() -> None:
    """With a blank, or with an underscore."""
    backward = signature(
        "aten::_scaled_dot_product_flash_attention_backward",
        ";".join(["BFloat16[2,8,512,64]"] * 5),
        ";".join(["BFloat16[2,8,512,64]"] * 3),
    )
    for pattern in ("attention_backward", "attention backward", "attention.*"):
        changed = with_change(KernelFactor(pattern=pattern, factor=3.0)).cost(backward)
        assert changed.device_ns == 3 * H100.cost(backward).device_ns


def test_issuing_a_kernel_takes_what_it_did() -> None:
    """A faster kernel is launched like a slow one."""
    changed = with_change(KernelFactor(pattern="mm", factor=0.1)).cost(PRODUCT)
    assert changed.host_ns == H100.cost(PRODUCT).host_ns


@pytest.mark.parametrize("call", [PRODUCT, ADD, VIEW])
def test_a_slower_host_issues_every_call_later(call: str) -> None:
    """Those that launch nothing, too; the device takes what it did."""
    changed, plain = with_change(HostFactor(factor=3.0)).cost(call), H100.cost(call)
    assert changed.host_ns == 3 * plain.host_ns
    assert changed.device_ns == plain.device_ns


def test_products_in_8_bits_cost_what_such_products_cost() -> None:
    """By the same model; the result keeps its type."""
    assert with_change(ProductDtype(name="fp8")).cost(PRODUCT) == H100.cost(FP8)
    assert H100.cost(FP8).device_ns < 0.7 * H100.cost(PRODUCT).device_ns


def test_a_bias_keeps_its_type() -> None:
    """It is no factor of the product."""
    found = with_change(ProductDtype(name="fp8")).cost(BIASED)
    expected = BIASED.replace("BFloat16[4096,4096]", "Float8_e4m3fn[4096,4096]", 2)
    assert found == H100.cost(expected)


def test_a_librarys_product_is_told_by_its_argument() -> None:
    """Transformer Engine keeps 8-bit floats as bytes."""
    change = ProductDtype(name="fp8")
    assert with_change(change).cost(LIBRARY) == H100.cost(LIBRARY.replace("bits=16", "bits=8"))


@pytest.mark.parametrize("text", [ODD, FP8, ADD, VIEW])
def test_what_cannot_be_multiplied_in_8_bits_stays(text: str) -> None:
    """Extents that the units do not take, products that are so already, and what is none."""
    assert with_change(ProductDtype(name="fp8")).cost(text) == H100.cost(text)


def test_a_type_that_a_gpu_does_not_know_is_refused() -> None:
    """An A100 has no 8-bit floats."""
    a100 = ChangedKernels(model=load_kernel_model("a100-80g"), change=ProductDtype(name="fp8"))
    with pytest.raises(UsageError, match="dtype=fp8"):
        a100.cost(PRODUCT)


def test_changes_come_on_top_of_each_other() -> None:
    """A factor is on the time in the other type."""
    both = (ProductDtype(name="fp8"), KernelFactor(pattern="gemm", factor=2.0))
    assert changed_kernels(H100, both).cost(PRODUCT).device_ns == 2 * H100.cost(FP8).device_ns


def test_who_asks_for_a_model_gets_the_changes_with_it() -> None:
    """Captures, recosting and live ranks ask here."""
    source = KernelCostSource(changes=(KernelFactor(pattern="mm", factor=2.0),))
    found = source.model(Cluster.load("h100-sxm").device).cost(PRODUCT)
    assert found.device_ns == 2 * H100.cost(PRODUCT).device_ns


def test_a_calibrated_device_costs_what_its_factors_say() -> None:
    """Below what-ifs, which come on top."""
    device = Cluster.load("h100-sxm").device
    factors = Calibration(kernels=1.1, host=2.0, host_error=0.3, steps=3)
    twice = KernelCostSource(changes=(KernelFactor(pattern="mm", factor=2.0),))
    found = twice.model(replace(device, calibration=factors)).cost(PRODUCT)
    plain = H100.cost(PRODUCT)
    assert found.device_ns == 2 * round(1.1 * plain.device_ns)
    assert found.host_ns == 2 * plain.host_ns
    assert (found.source, found.error) == (plain.source, plain.error)


def test_a_calibrated_device_is_the_known_one() -> None:
    """No data sheet: nothing is scaled, and errors are as wide as they were."""
    device = Cluster.load("h100-sxm").device
    factors = Calibration(host_error=0.3, steps=1)
    found = KernelCostSource().model(replace(device, calibration=factors))
    assert found.cost(PRODUCT) == H100.cost(PRODUCT)
