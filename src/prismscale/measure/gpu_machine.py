"""Which GPU, driver and torch a measurement was made with."""

from __future__ import annotations

import datetime
import subprocess

import torch


def describe_machine(command: str) -> dict[str, str]:
    """What every result says about where it comes from; ``command`` is how to repeat it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "command": command,
    }


def _driver_version() -> str:
    """Of the first GPU; ``unknown`` where nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return told.split("\n")[0] or "unknown"
