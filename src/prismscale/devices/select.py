"""Prepares the device of a rank's process before the program's first line."""

from __future__ import annotations

import os

import torch

from prismscale.cost.kernel_changes import KernelChange
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.devices.cuda import start_cuda
from prismscale.devices.null.session import NullEmulation
from prismscale.devices.rank_spec import RankSpec
from prismscale.devices.router_watch import RouterWatch
from prismscale.devices.storage import Storage
from prismscale.errors import UsageError


def router_watch(spec: RankSpec) -> RouterWatch | None:
    """Return a watch on the routers of a rank; None on a null device, which computes nothing."""
    return None if spec.device == "null" else RouterWatch(spec.routing, spec.device)


def claim_device(device: str, index: int) -> None:
    """Restrict this process to one core of this machine, or to one of its visible GPUs.

    torch may already be imported, but must not have used a GPU yet.

    Raises:
        UsageError: there is no such core or GPU.
    """
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        named = visible.split(",") if visible else [str(index)] * (index + 1)
        if not 0 <= index < len(named):
            raise UsageError(f"GPU {index} is not there; CUDA_VISIBLE_DEVICES is {visible!r}")
        os.environ["CUDA_VISIBLE_DEVICES"] = named[index]
        return
    try:
        os.sched_setaffinity(0, {index})
    except OSError as error:
        has = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise UsageError(f"core {index} is not there; there are {has}") from error


def start_device(spec: RankSpec, changes: tuple[KernelChange, ...] = ()) -> NullEmulation | None:
    """Start ``spec.device``; returns the emulation of a null device, None for a real one.

    Args:
        changes: changes to the costs of a null device's kernels.

    Raises:
        UsageError: this machine has no such device, and it cannot be emulated.
    """
    if spec.device == "null":
        if spec.gpu is None:
            raise UsageError(f"rank {spec.rank} has a null device, but no GPU to pretend to be")
        return NullEmulation(
            spec.gpu,
            devices_per_node=spec.local_world_size,
            devices_per_domain=spec.devices_per_domain or spec.local_world_size,
            costs=KernelCostSource(table=spec.kernels, fused=spec.fused, changes=changes),
            routing=spec.routing,
            stand_ins=spec.stand_ins,
            storage=Storage(write_bytes_per_s=spec.storage_bytes_per_s),
        )
    if spec.device == "cuda":
        start_cuda()
    elif "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() != 1:
        # torchrun sets OMP_NUM_THREADS=1, which comes too late if torch is imported already.
        torch.set_num_threads(1)
    return None
