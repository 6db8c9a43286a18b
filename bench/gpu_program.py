"""One rank of a real program on the GPU, or on the null device: steps, memory, and what it ran.

``python bench/gpu_program.py OUT --steps N [--kernels] [--null GPU] -- SCRIPT [ARGUMENTS]``. Rank
and world come from the environment, as with torchrun. Several ranks may share the one GPU: they
communicate through gloo, which can do that, and NCCL cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from prismscale.processes.children import die_with_parent


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kernels", action="store_true", help="list operations and kernels")
    parser.add_argument("--null", default="", help="run on the null device as this GPU")
    parser.add_argument("program", nargs="+")
    return parser.parse_args()


class Watch:
    """Marks the end of each step on the stream, and stops the program."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends: list[Any] = []

    def optimizer_begins(self) -> None:
        """Nothing to note."""

    def optimizer_ended(self) -> None:
        """One step more."""
        import torch

        from prismscale.emulation.script import StopProgram

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._ends.append(event)
        if len(self._ends) == self._steps:
            raise StopProgram

    def step_ns(self) -> list[int]:
        """From end to end."""
        import torch

        torch.cuda.synchronize()
        return [round(a.elapsed_time(b) * 1e6) for a, b in pairwise(self._ends)]


@contextmanager
def through_gloo() -> Any:
    """``init_process_group`` with gloo, whatever the program asks for."""
    from torch import distributed as dist

    original = dist.init_process_group

    def init(backend: Any = None, *args: Any, device_id: Any = None, **named: Any) -> None:
        original("gloo", *args, **named)

    dist.init_process_group = init
    try:
        yield
    finally:
        dist.init_process_group = original


@contextmanager
def counted(seen: dict[str, dict[str, int]], with_kernels: bool) -> Any:
    """Count torch operations, and the kernels they launch where there are any."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    operations: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            operations[str(func)] += 1
            return func(*args, **(kwargs or {}))

    if not with_kernels:
        with Count():
            yield
    else:
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as profile, Count():
            yield
        seen["kernels"] = {e.key: e.count for e in profile.key_averages()}
    seen["operations"] = dict(operations)


def main() -> None:
    """Run and write what was seen."""
    die_with_parent()
    options = parse()
    if options.null:
        from prismscale.devices.null.gpus import device_spec
        from prismscale.devices.null.runtime import activate

        activate(device_spec(options.null))
    import torch

    from prismscale.emulation.script import Script
    from prismscale.emulation.step_detection import watch_steps

    watch, seen = Watch(options.steps), {}
    with ExitStack() as stack:
        if int(os.environ["WORLD_SIZE"]) > 1 or options.null:
            stack.enter_context(through_gloo())
        stack.enter_context(watch_steps(watch))
        if options.kernels:
            stack.enter_context(counted(seen, with_kernels=not options.null))
        Script(target=options.program[0], args=tuple(options.program[1:])).run()
    body = {
        "step_ns": watch.step_ns(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        **seen,
    }
    options.out.write_text(json.dumps(body, indent=1))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
