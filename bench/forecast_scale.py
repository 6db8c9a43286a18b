"""What a forecast costs: draws of a job of 8,192 ranks, and the curve to 65,536.

The same rows as ``prismscale validate forecast``, alone; see ``prismscale.validation.scale``
for the job.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prismscale.validation.rows import finish
from prismscale.validation.scale import validate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="simulated steps a draw")
    parser.add_argument("--most-ranks", type=int, default=65_536)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = validate(
        draws=arguments.draws,
        workers=arguments.workers,
        steps=arguments.steps,
        most_ranks=arguments.most_ranks,
    )
    return finish(rows, title="Cost of a forecast", json_path=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
