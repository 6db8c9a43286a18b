"""Runs a training script and notes, on each rank and step, what its parameters came to.

    torchrun … bench/programs/followed.py FOLDER SCRIPT ARGS…

After each optimizer step ``FOLDER/rank-R.jsonl`` gets a line: sums of this rank's parameters and of
their squares, in double precision. Whatever a rank hears from others shows there one step later.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    """Follow the script."""
    folder, script, *rest = sys.argv[1:]
    path = Path(folder) / f"rank-{os.environ['RANK']}.jsonl"
    path.unlink(missing_ok=True)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = [_local(p).double() for group in optimizer.param_groups for p in group["params"]]
        sums = [sum(float(t.sum()) for t in own), sum(float((t * t).sum()) for t in own)]
        with path.open("a") as file:
            file.write(json.dumps(sums) + "\n")

    register_optimizer_step_post_hook(note)
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _local(parameter: Any) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


main()
