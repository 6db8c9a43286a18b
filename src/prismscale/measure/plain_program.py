"""One rank of a program run plainly on the GPU, or on the null device: steps, memory, operations.

``python -m prismscale.measure.plain_program OUT --steps N [--operations] [--trace PATH]
[--null GPU] [--module] -- SCRIPT [ARGUMENTS]`` writes :class:`.PlainFigures` to ``OUT``, or beside
it why the rank failed. ``--trace`` writes the last steps as torch's profiler saw them, for a
browser and for ``prismscale import kineto``.
Rank and world come from the environment, as with torchrun. Several ranks may share the one GPU:
they communicate through gloo, which can do that, and NCCL cannot.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from prismscale.capture.step_kinds import calls_per_step
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.runtime import activate
from prismscale.emulation.script import Script, StopProgram
from prismscale.emulation.step_detection import watch_steps
from prismscale.measure.gpu_figures import TRACED_STEPS, PlainFigures, error_path
from prismscale.processes.children import die_with_parent, end_now
from prismscale.processes.failure import save_failure
from prismscale.typed_files import save_json

PROGRAM_FOLLOWS = "--"


class StepEnds:
    """Marks the end of each optimizer call on the stream, and stops the program after ``steps``.

    A program may call several optimizers in a step; :func:`.calls_per_step` finds how many, as it
    does in a capture. ``before_last`` is called once, :data:`.TRACED_STEPS` steps before the end.
    """

    def __init__(self, steps: int, before_last: Callable[[], object] | None = None) -> None:
        self._steps = steps
        self._before_last = before_last
        self._ends: list[Any] = []
        self._optimizers: list[int] = []

    def optimizer_begins(self) -> None:
        """Do nothing: only the end of a call is marked."""

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Mark the end of one optimizer call.

        Raises:
            StopProgram: the call ends the last step that is wanted.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._ends.append(event)
        self._optimizers.append(optimizer)
        ended = len(self._step_ends())
        if ended == self._steps:
            raise StopProgram
        if self._before_last is not None and ended == self._steps - TRACED_STEPS:
            self._before_last()
            self._before_last = None

    def step_ns(self) -> tuple[int, ...]:
        """Return the time from the end of each step to the end of the next."""
        torch.cuda.synchronize()
        return tuple(round(a.elapsed_time(b) * 1e6) for a, b in pairwise(self._step_ends()))

    def _step_ends(self) -> list[Any]:
        calls = calls_per_step(self._optimizers)
        return self._ends[calls - 1 :: calls]


@contextmanager
def through_gloo() -> Iterator[None]:
    """Make ``init_process_group`` use gloo, whatever the program asks for."""
    original = dist.init_process_group

    def init(backend: Any = None, *args: Any, device_id: Any = None, **named: Any) -> None:
        original("gloo", *args, **named)

    dist.init_process_group = init
    try:
        yield
    finally:
        dist.init_process_group = original


class CountOperations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the operation, and run it."""
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class LastSteps:
    """Records with torch's profiler from :meth:`begin` to :meth:`end`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)

    def begin(self) -> None:
        """Start the profiler; kernels of earlier steps are not recorded."""
        torch.cuda.synchronize()
        self._profile.start()

    def end(self) -> tuple[Counter[str], Counter[str]]:
        """Write the trace, and return launches and time (ns) of each kernel."""
        torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        launches: Counter[str] = Counter()
        times: Counter[str] = Counter()
        seen: Any = self._profile.profiler
        for event in seen.kineto_results.events():
            on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
            if on_gpu and not event.is_user_annotation():
                launches[event.name()] += 1
                times[event.name()] += event.duration_ns()
        return launches, times


def run_plainly(
    script: Script, *, steps: int, on_null: bool, count: bool, trace: Path | None
) -> PlainFigures:
    """Run a program for ``steps`` steps, or to its end where that is earlier.

    Args:
        script: the program.
        steps: number of steps after which the program is stopped.
        on_null: whether the GPU is a null device.
        count: whether to count operations, which makes the program slow.
        trace: where to write the last steps as torch's profiler sees them; they are slower.
    """
    last = None if trace is None else LastSteps(trace)
    ends = StepEnds(steps, None if last is None else last.begin)
    counting = CountOperations()
    with ExitStack() as stack:
        if on_null or int(os.environ["WORLD_SIZE"]) > 1:
            stack.enter_context(through_gloo())
        stack.enter_context(watch_steps(ends))
        if count:
            stack.enter_context(counting)
        script.run()
    kernels, kernel_ns = ({}, {}) if last is None else last.end()
    return PlainFigures(
        step_ns=ends.step_ns(),
        peak_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        operations=dict(counting.calls),
        kernels=kernels,
        kernel_ns=kernel_ns,
    )


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Script]:
    """Split the command line into our options and the script after the first ``--``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--operations", action="store_true", help="count operations")
    parser.add_argument("--trace", type=Path, help="write the last steps' profile")
    parser.add_argument("--null", default="", help="run on the null device as this GPU")
    parser.add_argument("--module", action="store_true", help="SCRIPT is the name of a module")
    split = list(arguments).index(PROGRAM_FOLLOWS)
    options = parser.parse_args(arguments[:split])
    target, *rest = arguments[split + 1 :]
    return options, Script(target=target, args=tuple(rest), is_module=options.module)


def main() -> int:
    """Run the program and write its figures; return an exit code only if that failed."""
    die_with_parent()
    options, script = parse(sys.argv[1:])
    try:
        if options.null:
            activate(device_spec(options.null))
        figures = run_plainly(
            script,
            steps=options.steps,
            on_null=bool(options.null),
            count=options.operations,
            trace=options.trace,
        )
        save_json(figures, options.out)
    except BaseException as error:
        return save_failure(error_path(options.out), int(os.environ["RANK"]), error)
    # Daemon threads of the program (data loaders, profilers) must not hold up the end.
    end_now(0)


if __name__ == "__main__":
    sys.exit(main())
