"""Kernels that inductor generates: launched as ops, with the bytes they read and write.

A launch is one op ``inductor::<kernel>`` over the kernel's tensors. Its argument ``traffic_bytes``
is the number of bytes, so a kernel that reads a slice is not charged for the whole tensor. The
program's own Triton kernels are launched in a compiled region as they are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from prismscale.cost.kernel_kinds import is_generated
from prismscale.devices.null.custom_kernels import launch_source
from prismscale.devices.null.value_policy import set_known

_PASSES, _CONSTANTS = "null_passes", "null_constants"
"""Keys in a kernel's ``inductor_meta``, which is part of its source and so of inductor's caches."""
_Op = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], int], None]
_library: torch.library.Library


def install() -> None:
    """Create the namespace of the ops."""
    global _library
    _library = torch.library.Library("inductor", "FRAGMENT")
    _library.define("call(Tensor input) -> ()")
    _library.impl("call", lambda input: None, "Meta")


def annotate(triton_codegen: Any) -> None:
    """Note in each generated kernel the passes over its arguments and the constants it writes."""
    # Imported here because both import inductor.
    from prismscale.devices.null.compiled.constants import constants_of_arguments
    from prismscale.devices.null.compiled.traffic import passes_over_arguments

    kernel = triton_codegen.TritonKernel
    write = kernel.codegen_kernel

    def codegen_kernel(self: Any, name: Any = None) -> Any:
        notes = {_PASSES: passes_over_arguments(self), _CONSTANTS: constants_of_arguments(self)}
        meta = self.inductor_meta_common() | notes
        self.inductor_meta_common = lambda: meta  # written into the kernel's source
        try:
            return write(self, name)
        finally:
            del self.inductor_meta_common

    kernel.codegen_kernel = codegen_kernel


def replace_launches(heuristics: Any) -> None:
    """Launch ops in place of machine code, which is never generated."""

    def precompile(self: Any, *_: Any, **__: Any) -> None:
        """Compile nothing and tune nothing."""

    def run(self: Any, *arguments: Any, stream: Any = None, **named: Any) -> None:
        if not is_generated(self.fn.__name__):
            _launch_own(heuristics, self, arguments, named)
            return
        by_name = dict(zip(self.fn.arg_names, arguments, strict=False)) | named
        launch(self.fn.__name__, by_name, self.inductor_meta.get(_PASSES, {}))
        for argument, value in self.inductor_meta.get(_CONSTANTS, {}).items():
            written = by_name[argument]
            set_known(written, torch.full((), value, dtype=written.dtype))

    heuristics.CachingAutotuner.precompile = precompile
    heuristics.CachingAutotuner.run = run


def note_calls(output_code: Any) -> None:
    """Note each call of a compiled graph, which takes its host as long as an operator does.

    A region of the program is one graph forward and one backward. The guards, the runtime of
    AOTAutograd and the generated wrapper run for each.
    """
    graph = output_code.CompiledFxGraph
    call = graph.__call__

    def noted_call(self: Any, inputs: Sequence[Any]) -> Any:
        tensor = next((x for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda), None)
        if tensor is not None:
            with torch._C._AutoDispatchBelowAutograd():
                torch.ops.inductor.call(tensor)
        return call(self, inputs)

    graph.__call__ = noted_call


def _launch_own(
    heuristics: Any, tuner: Any, arguments: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Launch a Triton kernel of the program's own.

    Its constants are stored in ``tuner``. The values of its grid follow its arguments.
    """
    config = tuner.configs[0]
    constants = {**tuner.triton_meta["constants"], **config.kwargs}
    free = [name for name in tuner.fn.arg_names if name not in constants]
    values = dict(zip(free, arguments, strict=False)) | constants | dict(named)
    of_grid = tuner.inductor_meta.get("extra_launcher_args", ())
    extra = dict(zip(of_grid, arguments[len(free) :], strict=False))
    grid = heuristics.GridExpr.from_meta(tuner.inductor_meta, config)
    launch_source(tuner.fn, (), values, grid.eval_slow({**values, **extra}))


def launch(name: str, arguments: Mapping[str, Any], passes: Mapping[str, float]) -> None:
    """Run ``inductor::<name>`` over the CUDA tensors in ``arguments``; without any, do nothing.

    Args:
        name: name of the kernel.
        arguments: arguments of the launch, by name.
        passes: number of passes over the elements of each argument; 1 for arguments not in it.
    """
    tensors = {
        key: value
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_cuda
    }
    if not tensors:
        return
    traffic = sum(passes.get(key, 1.0) * t.numel() * t.itemsize for key, t in tensors.items())
    # The factors of a template ("arg_A", "arg_B") come before other inputs ("in_ptr0").
    by_role = sorted(tensors, key=lambda key: not key.startswith("arg_"))
    read = [tensors[key] for key in by_role if not _is_written(key)]
    written = [tensor for key, tensor in tensors.items() if _is_written(key)]
    with torch._C._AutoDispatchBelowAutograd():  # the backward pass is compiled separately
        _op(name)(read, written, round(traffic))


def _is_written(argument: str) -> bool:
    return "out" in argument.partition("_ptr")[0]


@cache
def _op(name: str) -> _Op:
    _library.define(f"{name}(Tensor[] read, Tensor(a!)[] written, int traffic_bytes) -> ()")
    _library.impl(name, lambda read, written, traffic_bytes: None, "Meta")
    op: _Op = getattr(torch.ops.inductor, name)
    return op
