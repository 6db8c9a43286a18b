"""What the processes of a job are told: specs of captured and live ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prismscale.capture.spec import CaptureSpec
from prismscale.cluster import Cluster
from prismscale.config import JobConfig
from prismscale.live.spec import LiveSpec


def capture_spec(config: JobConfig, cluster: Cluster, folder: Path) -> CaptureSpec:
    """Of every captured rank; the rank is filled in for each. ``folder`` takes the traces."""
    return CaptureSpec(
        **_of_any_rank(config, cluster, captures=folder),
        rank=0,
        samples=config.samples,
        track_memory=config.memory,
        out=str(folder),
    )


def live_spec(config: JobConfig, cluster: Cluster, captures: Path, folder: Path) -> LiveSpec:
    """Of every live rank; rank, trace, exchange and socket are filled in for each. ``folder`` takes
    the observations."""
    return LiveSpec(
        **_of_any_rank(config, cluster, captures=captures),
        rank=config.live[0],
        steps=config.steps,
        clock=config.clock,
        live=config.live,
        trace="",
        exchange="",
        gate=None,
        socket="",
        out=str(folder),
    )


def _of_any_rank(config: JobConfig, cluster: Cluster, captures: Path) -> dict[str, Any]:
    return {
        "world_size": config.world_size,
        "local_world_size": cluster.devices_per_node,
        "target": config.script.target,
        "is_module": config.script.is_module,
        "args": config.script.args,
        "device": config.device,
        "step_marker": config.step_marker,
        "communication_load": cluster.processor_communicates,
        "payloads": str(captures / "payloads"),
        "gpu": cluster.device.name,
        "gpu_memory_bytes": cluster.device.memory_bytes,
        "kernels": str(config.kernels.absolute()) if config.kernels else "",
        "fused": config.fused,
    }
