"""Compiled regions that run eagerly on the null device: which, how often, and why.

There are two cases. If inductor cannot work at all (Triton is missing) or the user wants the rule
of ``--fused``, dynamo is switched off and nothing is lowered; what the program passes to
``torch.compile`` is noted. If inductor fails on one region, or its kernels would lose values from
which the region's sizes follow, that region's graph runs operator by operator, partitioned by
AOTAutograd. Errors of the program itself (a graph break under ``fullgraph=True``) are raised as
usual.
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
"""Number of outermost modules in a region's name: a wrapper, and the module that it wraps."""
_PLACE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_regions: Counter[tuple[str, str]] = Counter()


def found() -> list[EagerRegion]:
    """Return the regions that this process has run eagerly, in the order in which they were met."""
    return [
        EagerRegion(region=name, reason=reason, count=count)
        for (name, reason), count in _regions.items()
    ]


def count_compiled(reason: str) -> None:
    """Count what the program passes to ``torch.compile``, which runs eagerly for ``reason``."""
    compile_now = torch.compile

    @wraps(compile_now)
    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:  # a decorator with options
            return lambda function: compile_later(function, **options)
        _regions[_name_of(model), reason] += 1
        return compile_now(model, **options)

    torch.compile = compile_later


def fall_back(compile_fx: Any) -> None:
    """Run graphs that inductor cannot lower, or cannot lower faithfully, operator by operator."""
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
            except Exception as error:  # anything that inductor cannot do
                reason = _first_line(error)
        _regions[region, reason] += 1
        return _run_operators(model, inputs)

    compile_fx.compile_fx = lower_or_run


def _takes_sizes_from_values(graph: Any) -> bool:
    """Return whether sizes follow from tensor values, such as the number of tokens of an expert.

    Operators pass such values on (``csrc/routing.cpp``); generated kernels would lose them.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes a second

    values = (node.meta.get("example_value") for part in _parts(graph) for node in part.graph.nodes)
    return any(
        free_unbacked_symbols(value)
        for value in values
        if isinstance(value, (torch.Tensor, torch.SymInt))
    )


def _run_operators(model: Any, inputs: Any) -> Any:
    """Run a graph through AOTAutograd without inductor.

    Checkpointed operators are recomputed, as AOTAutograd's partitioner decides.
    """
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
    """Return the modules, function, file and line of the first operator of a traced graph."""
    nodes = [node for part in _parts(graph) for node in part.graph.nodes]
    stacks = (stack for node in nodes if (stack := node.meta.get("nn_module_stack")))
    modules = [_class_name(kind) for _, kind in next(stacks, {}).values()][:_MODULES]
    traces = (node.stack_trace for node in nodes if node.stack_trace)
    places = _PLACE.findall(next(traces, ""))
    where = [f"{function} ({file}:{line})" for file, line, function in places[:1]]
    return ".".join([*modules, *where]) or "a graph without source"


def _parts(graph: Any) -> Iterator[torch.fx.GraphModule]:
    """Yield the graph and the graphs inside it, such as those of checkpointed code."""
    return (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
