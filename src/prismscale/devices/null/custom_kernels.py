"""The program's own kernels: Triton kernels and single CUDA kernels run as ops.

Extensions with CUDA sources are refused with an error that names them.

A Triton kernel writes into tensors that the program allocated, so it needs no shape rule. Every
launch becomes one op ``triton::<name>`` over its tensor arguments. Kernels of known libraries have
cost rules (:mod:`prismscale.devices.null.libraries.triton_kernels`). For other kernels the work is
read from the source: what they multiply and move (:mod:`prismscale.devices.null.triton_source`). If
the source does not tell, the values of all tensors become unknown, and the time is that of the
bytes they hold, unless a table of measured kernels has it. Nothing is compiled. Of several
configurations the one with the least work is taken
(:mod:`prismscale.devices.null.triton_source.tuning`). A CUDA source that is given to
``torch.cuda._compile_kernel`` becomes such a kernel, too: ``cuda_source::<name>``, over its tensor
arguments.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType
from typing import Any

import torch

from prismscale.devices.null.libraries import launches
from prismscale.devices.null.libraries.paged_stash import launch_paged_stash
from prismscale.devices.null.libraries.triton_kernels import known_cost
from prismscale.devices.null.triton_source import functions, tuning
from prismscale.devices.null.triton_source.kernel_work import tensors_of, work_of

_CUDA_SOURCES = (".cu", ".cuh")
_TRITON, _CUDA = "triton", "cuda_source"
_libraries: dict[str, torch.library.Library] = {}


def install() -> None:
    """Intercept the program's own kernels, now or when the modules behind them are imported."""
    for namespace in (_TRITON, _CUDA):
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    torch.cuda._compile_kernel = compile_kernel
    watcher = Watcher(
        {
            "triton.runtime.jit": _replace_launches,
            "triton.runtime.autotuner": tuning.replace_measurements,
            "torch.utils.cpp_extension": _refuse_cuda_sources,
        }
    )
    watcher.begin()


class Watcher(MetaPathFinder):
    """Import hook that changes modules right after the program first imports them.

    Importing them here would take seconds.
    """

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def begin(self) -> None:
        """Change the modules that are imported already, and watch for the others."""
        for name in [name for name in self._actions if name in sys.modules]:
            self._actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self._actions.pop(fullname, None)
        if action is None:
            return None

        @contextmanager
        def changed(module: ModuleType) -> Iterator[None]:
            yield
            action(module)

        return spec_executed_within(fullname, changed)


def spec_executed_within(
    name: str, around: Callable[[ModuleType], AbstractContextManager[None]]
) -> ModuleSpec | None:
    """Return a spec of the module ``name`` that executes it within the block ``around(module)``.

    The spec comes from the other finders, so the calling finder must no longer answer for ``name``.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with around(module):
                execute(module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010  (a method, to mypy)
    return spec


def _replace_launches(jit: Any) -> None:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        for hook in self.pre_run_hooks:
            hook(*args, **named)
        if not warmup:
            launch_source(self, args, named, grid)

    jit.JITFunction.run = run
    jit.JITFunction.__call__ = lambda self, *args, **named: functions.call(self, args, named)


def launch_source(kernel: Any, args: Sequence[Any], named: Mapping[str, Any], grid: Any) -> None:
    """Launch a Triton kernel: ``triton::<name>`` over the tensors of the launch.

    A launch without tensors, or with an empty grid, does nothing.

    Args:
        kernel: the object that ``triton.jit`` returned.
        args: positional arguments of the launch.
        named: keyword arguments; Triton's own options (``num_warps``) are among them.
        grid: number of programs along each axis, or a function of the arguments that returns it.
    """
    name, module = kernel.fn.__name__, kernel.fn.__module__
    parameters = _signature(kernel.fn)
    own = {key: value for key, value in named.items() if key in parameters.parameters}
    bound = parameters.bind(*args, **own)
    bound.apply_defaults()
    tensors = tensors_of(bound.arguments.values())
    if not tensors:
        return
    if not tuning.is_trial() and _is_known_launch(module, name, bound.arguments, tensors):
        return
    programs = grid({**named, **bound.arguments}) if callable(grid) else grid
    if 0 in programs:
        return
    work = work_of(kernel, bound.arguments, programs)
    if tuning.is_trial():
        tuning.note(work)
    elif work:
        writes = [tensors[place] for place in work.writes]
        # A kernel that reads and writes nothing is launched, too, and an op needs a tensor.
        reads = [tensors[place] for place in work.reads] if work.reads or writes else tensors
        launches.launch(f"triton::{name}", work.cost, reads=reads, writes=writes)
    else:
        _run(_TRITON, name, tensors)


def _is_known_launch(
    module: str, name: str, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> bool:
    """Launch a known library's kernel by its cost rule; return whether there is one."""
    if launch_paged_stash(module, name, arguments):
        return True
    cost = known_cost(module, name, tensors)
    if cost:
        launches.launch(f"triton::{name}", cost, writes=tensors)
    return cost is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaKernel:
    """A kernel from a CUDA source. It computes nothing."""

    name: str

    def __call__(
        self,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Launch it over the tensors among ``args``.

        Without any tensors, or with an empty grid, it does nothing.
        """
        tensors = tensors_of(args or ())
        if tensors and 0 not in grid:
            with torch.cuda.stream(stream):
                _run(_CUDA, self.name, tensors)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Accept the setting, which has no effect here."""


def compile_kernel(kernel_source: str, kernel_name: str, *_: Any, **__: Any) -> CudaKernel:
    """Replace ``torch.cuda._compile_kernel``, which needs a driver."""
    return CudaKernel(name=kernel_name)


def _run(namespace: str, name: str, tensors: list[torch.Tensor]) -> None:
    with torch._C._AutoDispatchBelowAutograd():  # the kernel's gradient is the program's own
        _op(namespace, name)(tensors)


def explain_missing(error: ModuleNotFoundError) -> None:
    """Add a hint to ``error`` if Triton is missing, which CPU builds of torch do not include."""
    if error.name is not None and error.name.partition(".")[0] == "triton":
        error.add_note(
            "The program has Triton kernels, and CPU builds of torch do not bring Triton along: "
            "pip install triton. The null device launches its kernels without a GPU and without "
            "compiling them"
        )


_signature = cache(signature)
"""Cached because it is needed for each launch."""


@cache
def _op(namespace: str, name: str) -> Callable[[list[torch.Tensor]], None]:
    _libraries[namespace].define(f"{name}(Tensor(a!)[] tensors) -> ()")
    _libraries[namespace].impl(name, lambda tensors: None, "Meta")
    op: Callable[[list[torch.Tensor]], None] = getattr(getattr(torch.ops, namespace), name)
    return op


def _refuse_cuda_sources(cpp_extension: Any) -> None:
    compile_now = cpp_extension._jit_compile
    parameters = signature(compile_now)

    def jit_compile(*args: Any, **named: Any) -> Any:
        given = parameters.bind(*args, **named).arguments
        sources = [str(source) for source in given["sources"]]
        if given.get("with_cuda") or any(name.endswith(_CUDA_SOURCES) for name in sources):
            raise OSError(
                f"the extension {given['name']!r} has CUDA sources, which cannot run on the null "
                "device. Define the operators that it brings with torch.library.define and give "
                "each a shape rule with torch.library.register_fake; their time is that of the "
                "bytes they touch, or comes from prismscale run --kernels FILE"
            )
        return compile_now(*args, **named)

    cpp_extension._jit_compile = jit_compile
