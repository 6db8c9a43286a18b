"""Spans timed by events, as captures take them, beside torch's profiler on the same steps.

    python bench/gpu/spans.py --json PATH [--layers 16] [--tokens 2048] [--hidden 2048]

A step goes forward and backward through equal blocks, with a mark between blocks. Steps without
anything, with marks, with the profiler and with both take turns: what each costs. Where both are
on, a span by its events stands beside the same span by the profiler: from the end of the last
kernel that was issued before it to the end of its own last one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from bisect import bisect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from timing import save

from prismscale.devices.cuda import CudaStreams
from prismscale.devices.stream_device import StreamDevice
from prismscale.formats.kineto.events import DEVICE, RUNTIME

TURNS = 8
WAYS = {
    "bare": (False, False),
    "marks": (True, False),
    "profiler": (False, True),
    "both": (True, True),
}
"""How a step is run: with marks, with the profiler."""


class Block(torch.nn.Module):
    """A gated feed-forward layer with its norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.gate, self.up = (torch.nn.Linear(hidden, 4 * hidden, **options) for _ in range(2))
        self.down = torch.nn.Linear(4 * hidden, hidden, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream in and out."""
        y = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclass(kw_only=True)
class Model:
    """Blocks, a step of them, and what is called between blocks of a step."""

    blocks: torch.nn.ModuleList
    x: torch.Tensor
    between: Callable[[], None] = lambda: None

    def step(self) -> None:
        """Forward and backward; ``between`` at each border, in both directions."""
        x = self.x
        for block in self.blocks:
            self.between()
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: self.between())
        self.between()
        x.backward(x.detach())
        self.between()
        for parameter in self.blocks.parameters():
            parameter.grad = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One step."""

    step_ms: float
    by_events_us: list[float]
    """Of each span; empty without marks."""
    by_profiler_us: list[float]
    """Of each span but the first ones, before which no kernel ran; empty without both."""


def turn(model: Model, streams: CudaStreams, *, marked: bool, profiled: bool) -> Turn:
    """Run a step."""
    device = StreamDevice(streams, name="cuda")
    lane, marks = device.lane(), []
    model.between = (lambda: marks.append(device.mark(lane))) if marked else (lambda: None)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=kinds) if profiled else None
    torch.cuda.synchronize()
    with profile or nullcontext():
        began.record()
        model.step()
        ended.record()
        torch.cuda.synchronize()
    return Turn(
        step_ms=began.elapsed_time(ended),
        by_events_us=[device.elapsed_ns(a, b) / 1e3 for a, b in pairwise(marks)],
        by_profiler_us=spans_of_trace(trace_of(profile), len(marks)) if profile and marks else [],
    )


def trace_of(profile: Any) -> dict[str, Any]:
    """What a profile saw, as it is exported."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
    return found


def spans_of_trace(trace: dict[str, Any], n_marks: int) -> list[float]:
    """Microseconds of each span by the profiler's kernels.

    Raises:
        RuntimeError: the trace has not the marks.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    calls = [event for event in events if event.get("cat") in RUNTIME]
    marks = sorted(call["ts"] for call in calls if call["name"].startswith("cudaEventRecord"))
    if len(marks) < n_marks + 2:
        raise RuntimeError(f"{len(marks)} events in the trace, {n_marks} marks and 2 were made")
    # The step's own first and last event are around its marks.
    marks = marks[-n_marks - 1 : -1]
    issued = {call["args"]["correlation"]: call["ts"] for call in calls}
    ends = [0.0] * (n_marks + 1)
    for event in events:
        at = issued.get(event["args"]["correlation"]) if event.get("cat") in DEVICE else None
        if at is not None:
            span = bisect(marks, at)
            ends[span] = max(ends[span], event["ts"] + event["dur"])
    reached = accumulate(ends[:n_marks], max)
    return [after - before for before, after in pairwise(reached) if before]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    blocks = torch.nn.ModuleList(Block(options.hidden) for _ in range(options.layers))
    x = torch.randn(options.tokens, options.hidden, device="cuda", dtype=torch.bfloat16)
    model = Model(blocks=blocks, x=x)
    for _ in range(5):
        model.step()
    streams = CudaStreams()
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    pairs: list[tuple[float, float]] = []
    for _ in range(TURNS):
        for name, (marked, profiled) in WAYS.items():
            found = turn(model, streams, marked=marked, profiled=profiled)
            took[name].append(found.step_ms)
            # The first spans have no kernel before them.
            skipped = len(found.by_events_us) - len(found.by_profiler_us)
            pairs += zip(found.by_events_us[skipped:], found.by_profiler_us, strict=True)
    figures = {
        "step_ms": {name: median(times) for name, times in took.items()},
        "difference_us": median(a - b for a, b in pairs),
        "largest_difference_us": max((a - b for a, b in pairs), key=abs),
    }
    print(figures)
    print(f"{len(pairs)} spans, median {median(b for _, b in pairs):.1f} us by the profiler")
    save(options.json, {**figures, "spans_us": pairs})


if __name__ == "__main__":
    main()
