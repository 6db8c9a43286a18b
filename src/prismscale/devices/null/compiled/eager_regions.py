"""Compiled regions that run eagerly on the null device: which, how often, and why.

Two ways lead here. Nothing is lowered where inductor cannot work at all (Triton is missing) or
the user wants the rule of ``--fused``: then dynamo is switched off, and what the program gives to
``torch.compile`` is noted. Or inductor fails on one region, or would lose values from which its
sizes follow: then its graph runs operator by operator, between AOTAutograd's partitions. Errors of
the program itself (a graph break under ``fullgraph=True``) are raised as ever.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from prismscale.analysis.emulated import EagerRegion

_SIZES_OF_VALUES = "sizes follow from values on the device, which generated kernels would lose"
_MODULES = 2
"""Outermost modules that a region is named by: a wrapper, and what it wraps."""
_PLACE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_regions: Counter[tuple[str, str]] = Counter()


def found() -> list[EagerRegion]:
    """Those of this process so far, in the order in which they were met."""
    return [
        EagerRegion(region=name, reason=reason, count=count)
        for (name, reason), count in _regions.items()
    ]


def count_compiled(reason: str) -> None:
    """Note what the program gives to ``torch.compile``: it runs eagerly, for ``reason``."""
    compile_now = torch.compile

    @wraps(compile_now)
    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:  # a decorator with options
            return lambda function: compile_later(function, **options)
        _regions[_name_of(model), reason] += 1
        return compile_now(model, **options)

    torch.compile = compile_later


def fall_back(compile_fx: Any) -> None:
    """Run the graphs that inductor cannot lower, or not truthfully, operator by operator."""
    from torch._dynamo.exc import RestartAnalysis

    lower: Callable[..., Any] = compile_fx.compile_fx

    @wraps(lower)
    def lower_or_run(model: Any, inputs: Any, **options: Any) -> Any:
        region, reason = _source_of(model), _SIZES_OF_VALUES
        if not _takes_sizes_from_values(model):
            try:
                return lower(model, inputs, **options)
            except RestartAnalysis:  # dynamo traces again: a float becomes a constant, for example
                raise
            except Exception as error:  # whatever inductor cannot do
                reason = _first_line(error)
        _regions[region, reason] += 1
        return _run_operators(model, inputs)

    compile_fx.compile_fx = lower_or_run


def _takes_sizes_from_values(graph: Any) -> bool:
    """Whether sizes follow from what tensors hold, as of experts' tokens: operators hand such
    values on (``csrc/routing.cpp``), generated kernels would lose them."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes a second

    values = (node.meta.get("example_value") for part in _parts(graph) for node in part.graph.nodes)
    return any(
        free_unbacked_symbols(value)
        for value in values
        if isinstance(value, (torch.Tensor, torch.SymInt))
    )


def _run_operators(model: Any, inputs: Any) -> Any:
    """AOTAutograd without inductor: what is checkpointed is computed again, as its partitioner
    decides."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    run = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
    )
    return run(model, inputs)


def _name_of(model: Any) -> str:
    function = getattr(model, "__func__", model)
    if owner := getattr(model, "__self__", None):
        return f"{type(owner).__qualname__}.{function.__name__}"
    return getattr(function, "__qualname__", type(model).__qualname__)


def _source_of(graph: Any) -> str:
    """Modules, function, file and line of the first operator of a graph that dynamo traced."""
    nodes = [node for part in _parts(graph) for node in part.graph.nodes]
    stacks = (stack for node in nodes if (stack := node.meta.get("nn_module_stack")))
    modules = [_class_name(kind) for _, kind in next(stacks, {}).values()][:_MODULES]
    traces = (node.stack_trace for node in nodes if node.stack_trace)
    places = _PLACE.findall(next(traces, ""))
    where = [f"{function} ({file}:{line})" for file, line, function in places[:1]]
    return ".".join([*modules, *where]) or "a graph without source"


def _parts(graph: Any) -> Iterator[torch.fx.GraphModule]:
    """The graph and those inside, as of what is checkpointed."""
    return (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
