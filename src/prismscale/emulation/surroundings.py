"""What a program's behaviour depends on besides its own code.

These are files that its arguments name, packages that are installed from a folder of sources or
found by ``PYTHONPATH``, versions of all other packages, and environment variables that frameworks
read. Files that a program opens by names of its own are not known.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlparse

from prismscale.emulation.script import Script

FRAMEWORK_VARIABLES = (
    *("CUBLAS_", "CUDA_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTHON", "PYTORCH_", "TORCH"),
    "TRITON_",
)
"""Prefixes of the environment variables that frameworks and their libraries read."""
SETTINGS = (".cfg", ".conf", ".gin", ".ini", ".json", ".py", ".toml", ".yaml", ".yml")
"""Endings of files that programs take settings from. A file of another kind may be an output."""
LARGEST_SETTINGS = 1 << 24
"""Bytes of the largest file that is read; of a larger one size and time of change count."""
_OUR_FOLDER = Path(__file__).resolve().parents[1]


def surroundings(script: Script, environment: Mapping[str, str] | None = None) -> list[object]:
    """Return plain values that change when a program may behave differently than before.

    Args:
        script: the program.
        environment: by default that of this process.
    """
    variables = os.environ if environment is None else environment
    return [
        sorted((k, v) for k, v in variables.items() if k.startswith(FRAMEWORK_VARIABLES)),
        [_content(path) for path in _named(script.args)],
        sorted(_installed()),
        sorted(_states(_source_folders(variables.get("PYTHONPATH", "")))),
    ]


def _named(arguments: Iterable[str]) -> Iterator[Path]:
    """Yield the files with settings that arguments name: ``--config a.yaml``, ``--config=a.yaml``,
    ``@a.json``."""
    for argument in arguments:
        path = Path(argument.rpartition("=")[2].lstrip("@"))
        if path.suffix in SETTINGS and os.access(path, os.R_OK) and path.is_file():
            yield path


def _content(path: Path) -> str:
    state = path.stat()
    if state.st_size > LARGEST_SETTINGS:
        return f"{state.st_size} {state.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _installed() -> Iterator[str]:
    """Yield the names of installed packages with their versions."""
    for folder in _package_folders():
        yield from (name for name in os.listdir(folder) if name.endswith(".dist-info"))


def _package_folders() -> list[Path]:
    named = {Path(entry) for entry in sys.path if entry.endswith("-packages")}
    return [folder for folder in sorted(named) if folder.is_dir()]


def _source_folders(python_path: str) -> Iterator[Path]:
    yield from (Path(entry) for entry in python_path.split(os.pathsep) if entry)
    for folder in _package_folders():
        for told in folder.glob("*.dist-info/direct_url.json"):
            yield from _editable(told)


def _editable(told: Path) -> Iterator[Path]:
    """Yield the folder of sources that a package is installed from, if it runs from there."""
    try:
        origin = json.loads(told.read_text(encoding="utf-8"))
        is_editable = bool(origin["dir_info"]["editable"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if is_editable:
        yield Path(unquote(urlparse(str(origin.get("url", ""))).path))


def _states(folders: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and time of change of each Python file in ``folders``, ours left out."""
    for root in dict.fromkeys(folder.resolve() for folder in folders):
        for folder, inner, files in os.walk(root):
            inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
            # Packages of a virtual environment are known by their versions.
            if "pyvenv.cfg" in files or Path(folder).is_relative_to(_OUR_FOLDER):
                inner.clear()
                continue
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with suppress(OSError):  # It may vanish meanwhile.
                        seen = os.stat(path, follow_symlinks=False)
                        yield path, seen.st_size, seen.st_mtime_ns
