"""Lets inductor compile for the null device: replaces everything that would need a GPU.

Each replacement is made in the module that defines the name, when that module is imported:

- the driver of Triton, which would load libcuda;
- launches of generated kernels (:mod:`prismscale.devices.null.compiled.generated_kernels`);
- allocations of compiled code, for which builds of torch without CUDA have no function;
- benchmarks: the first choice counts as the fastest, and no variant as faster than another;
- the hash over all of Triton, which is part of every cache key and of no use here;
- FlexAttention, whose template would read a mask (:mod:`prismscale.devices.null.flex`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from prismscale.devices.null.build import cache_directory
from prismscale.devices.null.compiled import eager_regions, generated_kernels
from prismscale.devices.null.compiled.availability import has_triton
from prismscale.devices.null.cuda_api import DeviceProperties
from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.flex import operators as flex_operators

_NO_TRITON = "Triton is missing (pip install triton); --fused costs such regions by a rule"
_BY_RULE = "--fused costs it by a rule"


def install(library: ctypes.PyDLL, *, lower: bool) -> None:
    """Prepare this process for ``torch.compile``.

    Compiled regions run eagerly if ``lower`` is False, if Triton is missing, or if the user has
    switched dynamo off (``TORCHDYNAMO_DISABLE=1``).
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return
    if not lower or not has_triton():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        eager_regions.count_compiled(_NO_TRITON if lower else _BY_RULE)
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache())
    generated_kernels.install()
    dynamo_guards: Any = torch._C._dynamo.guards
    dynamo_guards._empty_strided_cuda = _empty_strided
    Watcher(
        {
            "triton.backends.nvidia.driver": _replace_driver,
            "torch.utils._triton": _replace_hash,
            "torch._inductor.config": _configure,
            "torch._dynamo.utils": _know_constants,
            "torch._dynamo.callback": lambda callback: _compile_without_cost(library, callback),
            "torch._inductor.runtime.benchmarking": _time_nothing,
            "torch._inductor.runtime.triton_heuristics": generated_kernels.replace_launches,
            "torch._inductor.codegen.triton": generated_kernels.annotate,
            "torch._inductor.output_code": generated_kernels.note_calls,
            "torch._inductor.select_algorithm": _take_first_choice,
            "torch._inductor.compile_fx": eager_regions.fall_back,
            "torch._inductor.kernel.flex.flex_attention": flex_operators.lower_to_ops,
        }
    ).begin()


def _empty_strided(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a buffer of generated code, which deterministic programs leave unfilled, too."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def _cache() -> Path:
    """Return the folder in which inductor caches graphs and kernels for all ranks.

    It is a subfolder of the folder that the program sets, or of the user's cache, because real GPUs
    must not get the kernels generated here. Its name holds a hash of this package's code: other
    rules for what is noted in kernels need another folder.
    """
    rules = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    name = f"compiled-{sha256(rules).hexdigest()[:12]}"
    told = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_directory())
    return told if told.name == name else told / name


def _configure(config: Any) -> None:
    _set(config, "compile_threads", 1)  # other processes have no null device
    # CUDA graph trees roll the allocator back. Plain graphs record and replay the same kernels.
    _set(config, "triton.cudagraph_trees", False)


def _set(config: Any, name: str, value: object) -> None:
    """Set an option of inductor in every thread.

    A plain assignment holds only in the thread that makes it. The autograd engine's own threads
    compile backward graphs, and they read the default.
    """
    config._config[name].default = value
    setattr(config, name, value)


class _NoDriver:
    """Replaces the functions that Triton compiles against libcuda."""


def _know_constants(utils: Any) -> None:
    """Let dynamo treat a GPU's properties as constants, which it recognizes by their type."""
    utils.common_constant_types.add(DeviceProperties)


def _replace_driver(driver: Any) -> None:
    driver.CudaUtils = _NoDriver


def _replace_hash(triton_of_torch: Any) -> None:
    key = f"{version('triton')}-null"
    triton_of_torch.triton_hash_with_backend = lambda: key


def _compile_without_cost(library: ctypes.PyDLL, callback: Any) -> None:
    """Let compiling take no logical time: inductor calls operators where it learns its patterns."""
    handler = callback.CompilationCallbackHandler
    install_callbacks = handler.install_callbacks

    @contextmanager
    def without_cost(self: Any, trigger: Any, compile_id: str) -> Iterator[None]:
        records_graph = trigger.name == "CUDAGRAPH_RECORDING"  # runs the program's kernels
        library.ps_without_cost(int(not records_graph))
        try:
            with install_callbacks(self, trigger, compile_id):
                yield
        finally:
            library.ps_without_cost(0)

    handler.install_callbacks = without_cost


def _time_nothing(benchmarking: Any) -> None:
    """Give all variants of a kernel one time: inductor keeps the plain one and pads no products."""

    def benchmark_gpu(self: Any, *_: Any, **__: Any) -> float:
        return 1.0

    for kind in (benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker):
        kind.benchmark_gpu = benchmark_gpu


def _take_first_choice(select_algorithm: Any) -> None:
    """Offer only the first choice of a kernel, because nothing can be timed.

    It is the library's own kernel, unless that is switched off.
    """
    cache = select_algorithm.AlgorithmSelectorCache
    select = cache.__call__

    def select_first(self: Any, name: str, choices: list[Any], *rest: Any, **named: Any) -> Any:
        return select(self, name, choices[:1], *rest, **named)

    cache.__call__ = select_first
