"""Keeps the tensors of a rank in a file, so that a suspended rank's memory can be given back.

The allocator is a small C++ file (``csrc/spilled_allocator.cpp``) that is compiled once against the
headers of the installed torch. The spill file has no name, so its space is freed however the
process ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from prismscale.devices.null.build import cache_directory, find_compiler
from prismscale.errors import StorageError, UsageError

_SOURCE = Path(__file__).with_name("csrc") / "spilled_allocator.cpp"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DNDEBUG")


def build_allocator() -> Path:
    """Return the compiled allocator. Compiles it first if the user's cache has none.

    Raises:
        UsageError: there is no C++ compiler, or it fails.
        StorageError: the cache cannot be written.
    """
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256(
        b"\0".join([_SOURCE.read_bytes(), repr(_FLAGS).encode(), torch.__version__.encode()])
    ).hexdigest()[:16]
    library = cache_directory() / f"spilled-allocator-{key}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise UsageError(
            "--memory compiles an allocator once and found no C++ compiler; install one "
            "(Debian/Ubuntu: apt-get install g++), name it in CXX, or leave --memory out"
        )
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
            made = Path(scratch) / library.name
            torch_parts = f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"
            command = [compiler, *_FLAGS, str(_SOURCE), *torch_parts, "-o", str(made)]
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            if built.returncode:
                raise UsageError(f"{compiler} cannot compile {_SOURCE}:\n{built.stderr[-2000:]}")
            made.replace(library)
    except OSError as error:
        raise StorageError(f"cannot write {library.parent}: {error.strerror}") from error
    return library


class SpilledMemory:
    """Places all larger tensors that this process makes from now on in a file."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """
        Args:
            folder: a folder on the disk that takes the file.
            limit_bytes: most bytes that the file may hold.

        Raises:
            UsageError, StorageError: as :func:`build_allocator`, or the file cannot be made.
        """
        self._library = ctypes.CDLL(str(build_allocator()))
        self._library.ps_spill_into.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.ps_take_peak.restype = ctypes.c_int64
        try:
            # Stays open as long as the process lives, because tensors outlive everything else.
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror}") from error
        self._library.ps_spill_into(self._file.fileno(), limit_bytes)

    def take_peak(self) -> int:
        """Return the most bytes in the file at a time since the last call."""
        return int(self._library.ps_take_peak())

    def press_out(self) -> None:
        """Write changed pages to the file, and give the memory back until it is touched again.

        Raises:
            StorageError: the memory cannot be written.
        """
        failed: int = self._library.ps_press_out()
        if failed:
            raise StorageError(f"cannot write the memory of this rank: {os.strerror(failed)}")


def resident_bytes() -> int:
    """Return this process's memory, with shared pages counted in proportion (PSS); 0: unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split()[:2] for line in lines[1:])
    return int(sizes.get("Pss:", 0)) << 10
