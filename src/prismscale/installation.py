"""Examines what is installed on this machine, what works, and how to fix the rest."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Any

from prismscale.devices.null.build import cache_directory, find_compiler
from prismscale.processes.children import ending
from prismscale.torch_versions import installed_torch, supported_versions, torch_remark

LIBRARIES = (
    "torchtitan",
    "megatron-core",
    "transformer-engine",
    "deepspeed",
    "accelerate",
    "transformers",
    "triton",
)
"""Frameworks whose programs run on the null device, and libraries that they import."""
_TIMEOUT_S = 600
_LEAST_FREE_BYTES = 2 << 30

_CUDA_PROBE = """
import json, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
print(json.dumps({"build": torch.version.cuda, "gpu": gpu}))
"""


class State(Enum):
    """State of one part of an installation."""

    WORKS = "works"
    ABSENT = "absent"
    """The part is not there, and not needed."""
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found about one part of the installation."""

    part: str
    state: State
    detail: str
    mend: str = ""
    """The command or step that fixes the part; empty where there is nothing to fix."""


def examine() -> Iterator[Finding]:
    """Iterate over the findings of every part.

    The null device is tried out, and compiled if need be.
    """
    yield _here()
    torch = _torch()
    yield torch
    if torch.state is State.BROKEN:
        return
    yield Finding(part="device cpu", state=State.WORKS, detail="gloo is emulated, and timed here")
    yield _compiler()
    yield _null_device()
    yield _gpu()
    yield _libraries()
    yield _space()


def _here() -> Finding:
    detail = (
        f"{_version('prismscale')}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    return Finding(part="prismscale", state=State.WORKS, detail=detail)


def _torch() -> Finding:
    version = installed_torch()
    if version is None:
        return Finding(
            part="torch", state=State.BROKEN, detail="is not installed", mend="pip install torch"
        )
    remark = torch_remark(version)
    detail = f"{version}; tested with {supported_versions()}"
    return Finding(part="torch", state=State.WORKS, detail=detail, mend=remark or "")


def _compiler() -> Finding:
    compiler = find_compiler()
    if compiler is not None:
        return Finding(part="compiler", state=State.WORKS, detail=_first_line(compiler))
    return Finding(
        part="compiler",
        state=State.ABSENT,
        detail="no C++ compiler; the null device is compiled once for each torch",
        mend="apt-get install g++, or name one in CXX",
    )


def _first_line(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return said.stdout.split("\n")[0] or compiler


def _null_device() -> Finding:
    said = _child("-m", "prismscale.devices.null.self_test")
    if isinstance(said, str):
        return Finding(
            part="device null",
            state=State.BROKEN,
            detail=said,
            mend="see docs/null-device.md; other devices work without it",
        )
    detail = f"a training step ran on an H100 that is not here ({said['peak_bytes']:,} bytes)"
    if said["build_s"]:
        detail += f"; its extension was compiled in {said['build_s']:.0f} s"
    return Finding(part="device null", state=State.WORKS, detail=detail)


def _gpu() -> Finding:
    said = _child("-c", _CUDA_PROBE)
    if isinstance(said, str):
        return Finding(part="device cuda", state=State.BROKEN, detail=said)
    if said["gpu"]:
        return Finding(part="device cuda", state=State.WORKS, detail=said["gpu"])
    if said["build"]:
        detail = "torch finds no GPU here (nvidia-smi may say why)"
        return Finding(part="device cuda", state=State.ABSENT, detail=detail)
    return Finding(
        part="device cuda",
        state=State.ABSENT,
        detail="this torch is a CPU build",
        mend="on a machine with a GPU: pip install --force-reinstall torch, a CUDA build",
    )


def _child(*arguments: str) -> dict[str, Any] | str:
    """Run Python with ``arguments``; return the JSON that it printed, or why it failed."""
    try:
        child = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S} s"
    lines = child.stdout.strip().splitlines()
    if child.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return _why(child.stderr, child.returncode)


def _why(said: str, code: int) -> str:
    """Return the line that says why a process failed, which is the last line of its output.

    After a crash in native code it is made of the first lines that faulthandler wrote, because its
    last lines list modules.
    """
    lines = said.strip().splitlines()
    crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return lines[-1] if lines else ending(code)
    frame = next((line.strip() for line in lines[crash:] if line.startswith("  File")), "")
    return f"{lines[crash]}, {ending(code)}; {frame or 'no Python frame'}"


def _libraries() -> Finding:
    found = [f"{name} {version}" for name in LIBRARIES if (version := _version(name))]
    detail = ", ".join(found) or "none of those that prismscale knows"
    return Finding(part="frameworks", state=State.WORKS, detail=detail)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _space() -> Finding:
    folder = cache_directory()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    detail = f"{folder}, {free / 2**30:,.0f} GiB free"
    if free >= _LEAST_FREE_BYTES:
        return Finding(part="cache", state=State.WORKS, detail=detail)
    mend = "free some space, or set XDG_CACHE_HOME to a directory with more"
    return Finding(part="cache", state=State.BROKEN, detail=detail, mend=mend)
