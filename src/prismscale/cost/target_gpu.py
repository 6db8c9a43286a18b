"""The kernel profile of a cluster's GPU: that of a known GPU, or one scaled by its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from prismscale.cluster import Cluster, Device
from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile, ScaledGpu
from prismscale.cost.kernel_signature import TORCH_DTYPES
from prismscale.errors import UsageError, did_you_mean

_OF_NO_KERNEL = ("name", "memory_bytes", "scaled_from", "calibration")
"""Fields of a device on which no kernel's modelled time depends."""


def gpu_key(device: Device) -> str:
    """Return the key of the known GPU that ``device`` is, or is scaled from.

    Raises:
        UsageError: there is no such GPU.
    """
    profiles = KernelProfile.names()
    known = {name: key for name, key in Cluster.presets_by_gpu().items() if key in profiles}
    if device.scaled_from:
        if device.scaled_from not in known.values():
            hint = did_you_mean(device.scaled_from, known.values())
            raise UsageError(f"device.scaled_from is {device.scaled_from!r}; {hint}")
        return device.scaled_from
    if device.name not in known:
        raise UsageError(
            f"--device null cannot pretend to be {device.name!r}; GPUs that it knows: "
            f"{', '.join(known)}. Another is scaled from one that the cluster's file names as "
            f"device.scaled_from: {', '.join(known.values())}"
        )
    return known[device.name]


def profile_of(device: Device) -> KernelProfile:
    """Return the kernel profile of ``device``.

    Where the device's figures equal those of the known GPU's preset, this is the known GPU's
    profile. Where they differ, the known GPU's efficiencies apply to the device's own peaks,
    bandwidth, multiprocessors, cache and power
    (:class:`~prismscale.cost.kernel_profile.ScaledGpu`), with errors twice as wide.

    Raises:
        UsageError: there is no such GPU.
    """
    key = gpu_key(device)
    known, profile = Cluster.load(key).device, KernelProfile.load(key)
    if all(
        getattr(device, f.name) == getattr(known, f.name)
        for f in fields(Device)
        if f.name not in _OF_NO_KERNEL
    ):
        return replace(profile, device=device.name)
    bandwidth = profile.memory_bandwidth_bytes_per_s
    if device.memory_bandwidth_bytes_per_s and known.memory_bandwidth_bytes_per_s:
        bandwidth *= device.memory_bandwidth_bytes_per_s / known.memory_bandwidth_bytes_per_s
    same_peaks = device.peak_flops == known.peak_flops
    return ScaledGpu(
        name=key,
        device=device.name,
        scaled_from=key,
        multiprocessors=device.multiprocessors or profile.multiprocessors,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops=_peaks(device, known, profile),
        power_watts=device.power_watts or (profile.power_watts if same_peaks else None),
        clock_headroom=profile.clock_headroom,
        cache_bytes=device.cache_bytes,
        sources={"data_sheet": "the cluster's file"},
    ).profile()


def _peaks(device: Device, known: Device, profile: KernelProfile) -> Mapping[str, float]:
    """Return the device's peak for each element type of the known GPU's profile.

    The profile's peaks are scaled by a ratio, because they may differ in their last digits from
    those of the cluster's file.
    """
    found = {}
    for spelled, roofline in profile.gemm.items():
        dtype = TORCH_DTYPES.get(spelled, spelled)
        theirs = known.peak_flops.get(dtype)
        own = device.peak_flops.get(dtype, theirs)
        found[spelled] = roofline.peak_flops * (own / theirs if own and theirs else 1.0)
    return found


def kernel_model_of(device: Device, *, fused: bool = False) -> ModelledKernels:
    """Return the kernel model of ``device``.

    Raises:
        UsageError: there is no such GPU.
    """
    return ModelledKernels(profile=profile_of(device), fused=fused)
