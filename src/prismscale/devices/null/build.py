"""Compiles the null device's C++ extension once and keeps it in the user's cache.

The key of the shared object is torch's version and a hash of torch's library size, the sources, the
flags and torch's list of operators. If one of them changes, it is compiled again; environments with
the same torch share one object. A build runs in a directory of its own and is moved into place by
one atomic rename. A lock makes processes that start together wait for one build. If the object was
compiled when prismscale was installed (``setup.py``), it is in the package and is taken from there.

Nothing here imports torch, so the command itself can compile before it starts a rank.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from prismscale.errors import StorageError, UsageError
from prismscale.files import user_cache
from prismscale.torch_versions import installed_torch

INSTALLED = Path(__file__).with_name("built")
"""Folder with the objects that were compiled at installation."""
_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG")
_LIBRARIES = ("c10", "torch_cpu", "torch")
_NAME = "libprismscale_null.so"
_MOST_UNITS = 4
"""Most compilation units: with more, reading the headers again costs more time than it saves."""


def build_extension() -> Path:
    """Return the path of the compiled extension, which is compiled into the cache if needed.

    Raises UsageError without torch, without a C++ compiler or if the compiler fails, StorageError
    if the cache directory cannot be written.
    """
    library = extension_path()
    target = library.parent
    if library.exists():
        return library
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock")):
            if not library.exists():
                _build_into(target, _torch_directory())
    except OSError as error:
        raise StorageError(
            f"cannot write the extension cache {target.parent}: {error.strerror or error}; "
            "free some space, or set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    return library


def build_for_package(folder: Path) -> None:
    """Compile the extension into ``folder``, which becomes :data:`INSTALLED`.

    Raises UsageError as :func:`build_extension` does.
    """
    torch_dir = _torch_directory()
    folder.mkdir(parents=True, exist_ok=True)
    _build_into(folder / _cache_key(torch_dir), torch_dir)


def extension_path() -> Path:
    """Return where the extension for this torch is, or will be once it is compiled."""
    key = _cache_key(_torch_directory())
    installed = INSTALLED / key / _NAME
    return installed if installed.exists() else cache_directory() / key / _NAME


def is_built() -> bool:
    """Return whether the extension for this torch is compiled already."""
    return extension_path().exists()


def cache_directory() -> Path:
    """Return the folder for compiled objects in the user's cache."""
    return user_cache() / "null-device"


def cuda_operators(native_functions: str) -> list[str]:
    """Return the aten operators (``add.Tensor``) for which CUDA builds of torch have a kernel.

    ``native_functions`` is the text of ``native_functions.yaml``, which torch ships in torchgen. An
    operator counts when its dispatch table names CUDA, when torchgen writes its loop for both
    devices (``ufunc_inner_loop``), or when it delegates to one that counts.
    """
    with_kernel: set[str] = set()
    delegates: dict[str, str] = {}
    name = ""
    for line in native_functions.splitlines():
        if match := re.match(r"- func: ([\w.]+)\(", line):
            name = match.group(1)
        elif match := re.match(r"  structured_delegate: ([\w.]+)", line):
            delegates[name] = match.group(1)
        elif line.startswith("  ufunc_inner_loop:") or _has_cuda_row(line):
            with_kernel.add(name)
    with_kernel.update(name for name, target in delegates.items() if target in with_kernel)
    return sorted(with_kernel)


def _has_cuda_row(line: str) -> bool:
    """Return whether a line is a row of a dispatch table with CUDA: ``    CPU, CUDA: kernel``."""
    match = re.match(r"    ([\w, ]+): \w+", line)
    return match is not None and "CUDA" in re.split(r",\s*", match.group(1))


def has_torch() -> bool:
    """Return whether torch is installed, for which the extension could be compiled."""
    return importlib.util.find_spec("torch") is not None


def _torch_directory() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UsageError("the null CUDA device is compiled for torch, which is not installed")
    return Path(found.origin).parent


def _listing(torch_dir: Path) -> Path:
    """Return the path of torch's list of operators."""
    return torch_dir.parent / "torchgen/packaged/ATen/native/native_functions.yaml"


def _cache_key(torch_dir: Path) -> str:
    # The key has only what the object is made of: environments with the same torch share it.
    digest = hashlib.sha256()
    digest.update(" ".join(_FLAGS).encode())
    # Two builds of one version have libraries of different sizes.
    digest.update(str((torch_dir / "lib" / "libc10.so").stat().st_size).encode())
    digest.update(_listing(torch_dir).read_bytes())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch-{installed_torch()}-{platform.machine()}-{digest.hexdigest()[:16]}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel if the builder dies
        yield


def find_compiler() -> str | None:
    """Return the C++ compiler: ``$CXX``, or the first one on the PATH; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def _compiler() -> str:
    if name := find_compiler():
        return name
    raise UsageError(
        "the null CUDA device needs a C++ compiler (g++ or clang++ with C++20) to be built once, "
        "and none was found; install one (Debian/Ubuntu: apt-get install g++), or name it in CXX"
    )


def _build_into(target: Path, torch_dir: Path) -> None:
    compiler = _compiler()
    print("prismscale: compiling the null CUDA device (once; 15 to 60 seconds)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        work = Path(scratch)
        _write_operator_header(work / "cuda_ops.h", torch_dir)
        includes = [f"-I{work}", f"-I{_SOURCES}", f"-I{torch_dir / 'include'}"]
        includes.append(f"-I{torch_dir / 'include/torch/csrc/api/include'}")
        units = _write_units(work, min(os.cpu_count() or 1, _MOST_UNITS))
        objects = [unit.with_suffix(".o") for unit in units]

        def compile_one(unit: Path, output: Path) -> None:
            _run([compiler, *_FLAGS, *includes, "-c", str(unit), "-o", str(output)])

        with ThreadPoolExecutor(len(units)) as pool:
            list(pool.map(compile_one, units, objects))
        libraries = [f"-l{name}" for name in _LIBRARIES]
        _run(
            [
                compiler,
                "-shared",
                *map(str, objects),
                f"-L{torch_dir / 'lib'}",
                *libraries,  # without a run path: torch has loaded them before
                "-o",
                str(work / _NAME),
            ]
        )
        staged = work / "ready"
        staged.mkdir()
        (work / _NAME).rename(staged / _NAME)
        shutil.rmtree(target, ignore_errors=True)
        staged.rename(target)


def _write_units(work: Path, count: int) -> list[Path]:
    """Write units that together include all sources, with about equal shares.

    Reading torch's headers takes most of the time, and each unit reads them once. One unit for all
    sources takes 23 s of processor time, one unit for each source takes 90 s.
    """
    shares: list[list[Path]] = [[] for _ in range(count)]
    sizes = [0] * count
    for source in sorted(_SOURCES.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path)):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(source)
        sizes[smallest] += source.stat().st_size
    units = [work / f"unit_{i}.cpp" for i in range(count)]
    for unit, share in zip(units, shares, strict=True):
        unit.write_text("".join(f'#include "{source.name}"\n' for source in share))
    return units


def _write_operator_header(path: Path, torch_dir: Path) -> None:
    names = cuda_operators(_listing(torch_dir).read_text(encoding="utf-8"))
    path.write_text(_operator_header(names), encoding="utf-8")


def _operator_header(names: Iterable[str]) -> str:
    rows = [f'    "{name}",' for name in names]
    return "\n".join(
        [
            "#pragma once",
            "constexpr const char* kCudaOps[] = {",
            *rows,
            "};",
            f"constexpr int kCudaOpCount = {len(rows)};",
            "",
        ]
    )


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        tail = "\n".join(result.stderr.strip().splitlines()[-15:])
        raise UsageError(
            f"compiling the null CUDA device failed (exit code {result.returncode} of "
            f"{command[0]}); it needs a C++20 compiler that matches this torch:\n{tail}"
        )
