"""Kernels of the GPU that a cluster names, known or by its data sheet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prismscale.cluster import Cluster, Device
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import FIELD
from prismscale.cost.target_gpu import kernel_model_of, profile_of
from prismscale.devices.null.gpus import target_gpu
from prismscale.errors import UsageError

B200 = Cluster.load("b200").device
GPUS = [name for name in Cluster.presets() if name in KernelProfile.names()]
TENSOR = "BFloat16[8192,8192]"
PRODUCT = FIELD.join(("aten::mm", f"{TENSOR};{TENSOR}", TENSOR, ""))
ADDITION = FIELD.join(("aten::add.Tensor", f"{TENSOR};{TENSOR}", TENSOR, ""))


def ns(device: Device, signature: str) -> int:
    """Of one call."""
    return kernel_model_of(device).cost(signature).device_ns


@pytest.mark.parametrize("name", GPUS)
def test_a_preset_has_its_own_kernels(name: str) -> None:
    """Nothing is scaled, however its figures are spelled."""
    assert profile_of(Cluster.load(name).device) == KernelProfile.load(name)


def test_another_name_or_memory_changes_no_kernel() -> None:
    """Only what the program sees."""
    mine = replace(B200, name="NVIDIA Mine", memory_bytes=1 << 38, scaled_from="b200")
    assert replace(profile_of(mine), device=B200.name) == KernelProfile.load("b200")
    shown = target_gpu(mine, devices_per_node=4)
    assert (shown.name, shown.total_memory_bytes) == ("NVIDIA Mine", 1 << 38)


def test_half_the_memory_bandwidth_takes_what_is_bound_by_it_twice_as_long() -> None:
    """And leaves a product alone."""
    half = replace(B200, memory_bandwidth_bytes_per_s=4.0e12)
    assert ns(half, ADDITION) == pytest.approx(2 * ns(B200, ADDITION), rel=0.1)
    assert ns(half, PRODUCT) == pytest.approx(ns(B200, PRODUCT), rel=0.01)


def test_twice_the_peak_halves_a_product() -> None:
    """With as many more watts, of which nothing is said. With the same watts it may gain nothing,
    but loses nothing."""
    peaks = {**B200.peak_flops, "bfloat16": 2 * B200.peak_flops["bfloat16"]}
    double = replace(B200, peak_flops=peaks)
    assert ns(double, PRODUCT) == pytest.approx(ns(B200, PRODUCT) / 2, rel=0.1)
    limited = replace(double, power_watts=1000)
    assert ns(double, PRODUCT) < ns(limited, PRODUCT) <= ns(B200, PRODUCT)


def test_a_scaled_gpus_errors_are_wider() -> None:
    """Nobody has measured it."""
    half = replace(B200, memory_bandwidth_bytes_per_s=4.0e12)
    assert profile_of(half).errors["gemm"] > profile_of(B200).errors["gemm"]


def test_a_gpu_that_nobody_knows_is_scaled_from_one_that_somebody_does() -> None:
    """The message says how."""
    unknown = replace(B200, name="NVIDIA Rubin")
    with pytest.raises(UsageError, match=r"pretend to be 'NVIDIA Rubin'.*scaled_from: .*b200"):
        profile_of(unknown)
    assert profile_of(replace(unknown, scaled_from="b200")).device == "NVIDIA Rubin"
    with pytest.raises(UsageError, match=r"scaled_from is 'b20'.*did you mean b200"):
        profile_of(replace(unknown, scaled_from="b20"))
