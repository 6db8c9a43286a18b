"""Runs a training script and notes, on each rank, the peak of torch's CPU memory: ``peaks.py FOLDER
SCRIPT ARGS…``, with the library of ``allocations.py`` in front of torch's own functions."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from allocations import counted_peak_bytes


def main() -> None:
    """Count while the script runs."""
    folder, script, *rest = sys.argv[1:]
    path = Path(folder) / f"peak-{os.environ['RANK']}"

    def note(*_: Any) -> None:
        path.write_text(str(counted_peak_bytes()))

    register_optimizer_step_post_hook(note)
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


main()
