"""8,192 ranks from the command line, and 65,536 through the engine.

    python bench/scale.py --json out.json

Runs ``prismscale run`` as a user would (TP 8 × PP 16 × DP 64, 1F1B, 64 microbatches, debug widths,
one live rank) in a folder of its own, nothing reused, and reads its ``results.json``; then measures
the engine on the synthetic job of the same shape at 8,192 and 65,536 ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import engine
from prismscale.validation.rows import Row, finish

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama" / "train.py"
GIB = 1 << 30


def run_8192(folder: Path) -> list[Row]:
    """The whole command at 8,192 ranks."""
    options = ["--world-size", "8192", "--live", "0", "--samples", "1", "--steps", "2"]
    job = ["--model", "debug", "--layers", "16", "--tp", "8", "--pp", "16", "--dp-mode", "fsdp2"]
    more = ["--microbatches", "64", "--steps", "1000", "--log-every", "1", "--log-rank", "0"]
    command = [sys.executable, "-m", "prismscale", "run", *options, "--out", str(folder)]
    began = time.monotonic()
    subprocess.run([*command, str(EXAMPLE), *job, *more], check=True)
    wall_s = time.monotonic() - began
    result = json.loads((folder / "results.json").read_text())
    live = result["live"][0]
    return [
        Row.at_most("8,192 ranks: whole command", wall_s, 300, "s"),
        Row.at_most("8,192 ranks: memory", result["peak_rss_bytes"] / GIB, 4, "GiB"),
        Row.at_most("8,192 ranks: a live rank's first communication", live["boot_s"], 5, "s"),
        Row.told("8,192 ranks: captured ranks", len(result["captured"])),
        Row.told("8,192 ranks: rank-nodes of a step", result["rank_nodes"]),
        *(Row.told(f"8,192 ranks: {k}", v, "s") for k, v in result["wall_s"].items()),
    ]


def main() -> int:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        rows = run_8192(Path(name) / "run")
    rows += [*engine.measure(64, "8,192 ranks"), *engine.measure(512, "65,536 ranks")]
    return finish(rows, json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
