"""Compile the null device's C++ extension once and keep it in the user's cache.

The shared object is keyed by torch's version, the Python ABI and a hash of sources and flags, so an
upgrade of either compiles anew. Builds run in a directory of their own and are moved into place
by one atomic rename; a lock makes processes that start together wait for one build.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
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

_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG")
_LIBRARIES = ("c10", "torch_cpu", "torch")
_NAME = "libprismscale_null.so"


def build_extension() -> Path:
    """Path of the compiled extension, compiling it first where the cache has none.

    Raises UsageError without a C++ compiler or when the compiler fails, StorageError when the cache
    directory cannot be written.
    """
    torch_dir = _torch_directory()
    target = cache_directory() / _cache_key(torch_dir)
    library = target / _NAME
    if library.exists():
        return library
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not library.exists():
                _build_into(target, torch_dir)
    except OSError as error:
        raise StorageError(
            f"cannot write the extension cache {target.parent}: {error.strerror or error}; "
            "free some space, or set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    return library


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/prismscale`` or ``~/.cache/prismscale``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prismscale" / "null-device"


def cuda_operators(native_functions: str) -> list[str]:
    """Names (``add.Tensor``) of the aten operators for which CUDA builds of torch have a kernel.

    ``native_functions`` is the text of ``native_functions.yaml``, which torch ships in torchgen. An
    operator counts when its dispatch table names CUDA, or when it delegates to one that does.
    """
    with_kernel: set[str] = set()
    delegates: dict[str, str] = {}
    name = ""
    for line in native_functions.splitlines():
        if match := re.match(r"- func: ([\w.]+)\(", line):
            name = match.group(1)
        elif match := re.match(r"  structured_delegate: ([\w.]+)", line):
            delegates[name] = match.group(1)
        elif (match := re.match(r"    ([\w, ]+): \w+", line)) and "CUDA" in re.split(
            r",\s*", match.group(1)
        ):
            with_kernel.add(name)
    with_kernel.update(name for name, target in delegates.items() if target in with_kernel)
    return sorted(with_kernel)


def _torch_directory() -> Path:
    import torch

    return Path(torch.__file__).parent


def _cache_key(torch_dir: Path) -> str:
    import torch

    digest = hashlib.sha256()
    digest.update(" ".join(_FLAGS).encode())
    digest.update(str(torch_dir).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel if the builder dies
        yield


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name):
            return name
    raise UsageError(
        "the null CUDA device needs a C++ compiler (g++ or clang++ with C++20) to be built once, "
        "and none was found; install one (Debian/Ubuntu: apt-get install g++), or name it in CXX"
    )


def _build_into(target: Path, torch_dir: Path) -> None:
    compiler = _compiler()
    print("prismscale: compiling the null CUDA device (once, about a minute)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        work = Path(scratch)
        _write_operator_header(work / "cuda_ops.h", torch_dir)
        includes = [f"-I{work}", f"-I{_SOURCES}", f"-I{torch_dir / 'include'}"]
        includes.append(f"-I{torch_dir / 'include/torch/csrc/api/include'}")
        sources = sorted(_SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        objects = [work / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, output: Path) -> None:
            _run([compiler, *_FLAGS, *includes, "-c", str(source), "-o", str(output)])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, sources, objects))
        libraries = [f"-l{name}" for name in _LIBRARIES]
        _run(
            [
                compiler,
                "-shared",
                *map(str, objects),
                f"-L{torch_dir / 'lib'}",
                *libraries,
                f"-Wl,-rpath,{torch_dir / 'lib'}",
                "-o",
                str(work / _NAME),
            ]
        )
        staged = work / "ready"
        staged.mkdir()
        (work / _NAME).rename(staged / _NAME)
        shutil.rmtree(target, ignore_errors=True)
        staged.rename(target)


def _write_operator_header(path: Path, torch_dir: Path) -> None:
    listing = torch_dir.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    names = cuda_operators(listing.read_text(encoding="utf-8"))
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
