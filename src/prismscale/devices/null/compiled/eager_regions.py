"""Compiled regions that run eagerly on the null device: which, how often, and why.

Two ways lead here. Nothing is lowered where inductor cannot work at all (Triton is missing) or
the user wants the rule of ``--fused``: then dynamo is switched off, and what the program gives to
``torch.compile`` is noted. Or inductor fails on one region: then its graph runs operator by
operator. Errors of the program itself (a graph break under ``fullgraph=True``) are raised as ever.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from prismscale.analysis.emulated import EagerRegion

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
    """Run the graphs that inductor cannot lower operator by operator."""
    lower: Callable[..., Any] = compile_fx.compile_fx

    @wraps(lower)
    def lower_or_run(model: Any, inputs: Any, **options: Any) -> Any:
        region = _source_of(model)
        try:
            return lower(model, inputs, **options)
        except Exception as error:  # whatever inductor cannot do
            _regions[region, _first_line(error)] += 1
            return model.forward

    compile_fx.compile_fx = lower_or_run


def _name_of(model: Any) -> str:
    function = getattr(model, "__func__", model)
    if owner := getattr(model, "__self__", None):
        return f"{type(owner).__qualname__}.{function.__name__}"
    return getattr(function, "__qualname__", type(model).__qualname__)


def _source_of(graph: Any) -> str:
    """Function, file and line of the first operator of a graph that dynamo traced."""
    traces = (node.stack_trace for node in graph.graph.nodes if node.stack_trace)
    places = _PLACE.findall(next(traces, ""))
    if not places:
        return "a graph without source"
    file, line, function = places[0]
    return f"{function} ({file}:{line})"


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
