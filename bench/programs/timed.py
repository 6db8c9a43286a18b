"""``torchrun … timed.py OUT train.py ARGS``: a program, with the end of each optimizer call noted.

Each rank writes ``OUT/rank-<r>.json``: readings of the machine's monotonic clock, in ns, which all
processes of a machine share.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    """Run the program named on the command line as its own."""
    out, program = Path(sys.argv[1]), sys.argv[2]
    ends: list[int] = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.monotonic_ns()))
    path = out / f"rank-{os.environ['RANK']}.json"
    atexit.register(lambda: path.write_text(json.dumps(ends)))
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
