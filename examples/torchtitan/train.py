"""``torchtitan.train`` of torchtitan 0.3.0 on torch 2.13, for ``prismscale run``.

torchtitan 0.3.0 was written for a later torch, whose pipeline schedules take microbatches that are
split already (``step(arg_mbs=…)``). On torch 2.13 that call is answered here by the method that
``step`` itself ends in. Nothing of torchtitan is changed; without pipeline parallelism run
``-m torchtitan.train`` itself.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import schedules


def accept_microbatches(schedule: type[Any]) -> None:
    """Let ``schedule.step`` take microbatches where this torch's does not."""
    split_step = schedule.step
    if "arg_mbs" in inspect.signature(split_step).parameters:
        return

    def step(self: Any, *args: Any, kwarg_mbs: Sequence[Any] | None = None, **named: Any) -> Any:
        if kwarg_mbs is None:
            return split_step(self, *args, **named)
        stages = getattr(self, "_stages", None) or [self._stage]
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        microbatches = (named.pop("arg_mbs", None), kwarg_mbs, named.pop("target_mbs", None))
        return self._step_microbatches(*microbatches, **named)

    schedule.step = step


def main() -> None:
    """Run torchtitan with this process's arguments."""
    accept_microbatches(schedules.PipelineScheduleSingle)
    accept_microbatches(schedules.PipelineScheduleMulti)
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
