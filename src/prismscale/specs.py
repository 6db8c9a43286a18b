"""What the processes of a job are told: specs of captured and live ranks."""

from __future__ import annotations

from pathlib import Path

from prismscale.capture.spec import CaptureSpec
from prismscale.cluster import Cluster
from prismscale.config import JobConfig
from prismscale.live.spec import LiveSpec


def payload_folder(captures: Path) -> str:
    """Where captured ranks leave payloads for each other and for live ones."""
    return str(captures / "payloads")


def capture_spec(config: JobConfig, cluster: Cluster, folder: Path) -> CaptureSpec:
    """Of every captured rank; the rank is filled in for each. ``folder`` takes the traces."""
    return CaptureSpec(
        rank=0,
        world_size=config.world_size,
        local_world_size=cluster.devices_per_node,
        target=config.script.target,
        is_module=config.script.is_module,
        args=config.script.args,
        device=config.device,
        samples=config.samples,
        step_marker=config.step_marker,
        track_memory=config.memory,
        communication_load=cluster.processor_communicates,
        payloads=payload_folder(folder),
        out=str(folder),
        gpu=cluster.device.name,
        gpu_memory_bytes=cluster.device.memory_bytes,
    )


def live_spec(config: JobConfig, cluster: Cluster, captures: Path, folder: Path) -> LiveSpec:
    """Of every live rank; rank, trace, exchange and socket are filled in for each. ``folder`` takes
    the observations."""
    return LiveSpec(
        rank=config.live[0],
        world_size=config.world_size,
        local_world_size=cluster.devices_per_node,
        target=config.script.target,
        is_module=config.script.is_module,
        args=config.script.args,
        device=config.device,
        steps=config.steps,
        step_marker=config.step_marker,
        # Nobody could wait in real time for a device that is not there.
        clock="virtual" if config.device == "null" else config.clock,
        communication_load=cluster.processor_communicates,
        live=config.live,
        trace="",
        payloads=payload_folder(captures),
        exchange="",
        gate=None,
        socket="",
        out=str(folder),
        gpu=cluster.device.name,
        gpu_memory_bytes=cluster.device.memory_bytes,
    )
