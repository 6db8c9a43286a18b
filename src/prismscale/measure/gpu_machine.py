"""Describes the GPU, driver and torch that a measurement was made with."""

from __future__ import annotations

import datetime
import subprocess

import torch


def describe_machine(command: str) -> dict[str, str]:
    """Return the origin that every result states; ``command`` repeats the measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "command": command,
    }


def _driver_version() -> str:
    """Return the driver version of the first GPU; ``unknown`` if nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return told.split("\n")[0] or "unknown"
