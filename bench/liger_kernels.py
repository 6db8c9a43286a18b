"""Liger's Triton kernels by Liger's own benchmark scripts, beside Liger's published measurements.

    python bench/liger_kernels.py --liger DIR --gpu NAME [--truth DIR] [--json PATH]

DIR is a checkout of linkedin/Liger-Kernel (at ead96b6), whose ``liger_kernel`` is installed
(``pip install --no-deps liger-kernel``), with Triton. A published row goes to the function that the
script of its kernel measures with, and so to ``triton.testing.do_bench``, on a null GPU: what the
kernels do is read off their source (``devices/null/triton_source``), nothing of Liger is known to
the product, and nothing is fitted on these rows. Scripts have changed since many rows were
published: sizes that they called otherwise then are renamed, and a row that its script does not
take all the same is counted and left out. A benchmark of single kernels empties the L2 cache and
ends before the power limit is felt, and so do these.

Rows of kernels that end within 50 µs are bound by launches, which ``do_bench`` sees.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import tests_on_path  # noqa: F401
from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.kernel_ledger import KernelLedger
from prismscale.devices.null.runtime import activate
from prismscale.validation.error_rows import error_rows
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from runs import our_commit

DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
TABLES = ("all_benchmark_data.csv", "all_benchmark_data_cutile.csv")
DEVICES = {
    "a100-80g": "NVIDIA A100-SXM4-80GB",
    "h100-sxm": "NVIDIA H100 80GB HBM3",
    "b200": "NVIDIA B200",
}
SHORTEST_MS = 0.05
OTHER_BACKENDS = ("cutile", "cutedsl")
RENAMED = {
    "V": "vocab_size",
    "H": "hidden_size",
    "N": "hidden_size",
    "D": "hidden_size",
    "B": "bsz",
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""Sizes that scripts called otherwise."""


class FoundError(Exception):
    """The function that a script measures with; the script is not run further."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function


def published(truth: Path, gpu: str) -> Iterator[dict[str, str]]:
    """Rows of Triton's kernels on ``gpu``."""
    for name in TABLES:
        with (truth / "liger" / name).open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text):
                provider = row["kernel_provider"].replace("liger_triton", "liger")
                is_ours = provider.startswith("liger") and not any(
                    other in provider for other in OTHER_BACKENDS
                )
                if is_ours and row["metric_name"] == "speed" and row["gpu_name"] == DEVICES[gpu]:
                    yield row | {"kernel_provider": provider}


@cache
def bench_function(scripts: Path, kernel: str) -> Callable[[Any], Any]:
    """What the script of ``kernel`` measures speed with."""
    configs: Any = import_module("benchmark_model_configs")
    utils: Any = import_module("utils")

    def stopped(**named: Any) -> None:
        raise FoundError(named["bench_test_fn"])

    def nothing(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    utils.run_benchmarks = stopped
    # Sweeps try how much memory holds.
    configs.build_token_length_sweep = configs.build_model_config_sweep = nothing
    script = scripts / f"benchmark_{kernel}.py"
    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except FoundError as found:
        return found.function
    raise ValueError(f"{script} measures nothing")


def predicted_ms(scripts: Path, row: Mapping[str, str]) -> float:
    """What the script of a row measures on the null GPU."""
    x, config = sizes_of(row)
    asked = import_module("utils").SingleBenchmarkRunInput(
        x=x,
        kernel_provider=row["kernel_provider"],
        kernel_operation_mode=row["kernel_operation_mode"],
        extra_benchmark_config=config,
    )
    with contextlib.redirect_stdout(None):
        found = bench_function(scripts, row["kernel_name"])(asked)
    return float(found.y_50)


def sizes_of(row: Mapping[str, str]) -> tuple[int | str, dict[str, Any]]:
    """What a row varies, and its configuration, as scripts of today take them: tokens vary."""
    config: dict[str, Any] = json.loads(row["extra_benchmark_config_str"])
    if isinstance(dtype := config.get("dtype"), str):
        config["dtype"] = getattr(torch, dtype.removeprefix("torch."))
    x: int | str = int(row["x_value"]) if row["x_value"].isdecimal() else row["x_value"]
    if row["x_name"] in ("V", "H", "N") and not {"vocab_size", "hidden_size"} & set(config):
        length = config.get("seq_len", config.get("T", 0))
        if tokens := config.get("M") or length * config.get("B", 1):
            config[RENAMED[row["x_name"]]], x = x, tokens
    for old, new in RENAMED.items():
        if old in config:
            config.setdefault(new, config[old])
    return x, config


def measure(scripts: Path, truth: Path, gpu: str) -> Iterator[Row]:
    """All rows of one GPU."""
    errors: dict[str, list[float]] = defaultdict(list)
    long: list[float] = []
    left_out: dict[str, str] = {}
    rows = list(published(truth, gpu))
    for row in rows:
        # What a script does with a configuration of before may be anything.
        try:
            predicted = predicted_ms(scripts, row)
        except Exception as error:
            left_out[row["kernel_name"]] = f"{type(error).__name__}: {error}"
            continue
        measured = float(row["y_value_50"])
        signed = 100 * (predicted / measured - 1)
        errors[f"{row['kernel_name']} {row['kernel_operation_mode']}"].append(signed)
        if measured >= SHORTEST_MS:
            long.append(signed)
    every = [signed for group in errors.values() for signed in group]
    yield Row.told(f"{gpu} Liger: rows that its scripts still run", len(every), f"of {len(rows)}")
    yield from error_rows(f"{gpu} Liger, all kernels", every)
    yield from error_rows(f"{gpu} Liger, 50 µs and more", long)
    for name, group in sorted(errors.items()):
        yield from error_rows(f"{gpu} Liger {name}", group)
    for name, why in sorted(left_out.items()):
        print(f"left out, {gpu} {name}: {why[:120]}", file=sys.stderr)


def main() -> int:
    """Run the rows of one GPU, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--liger", type=Path, required=True, help="checkout of Liger-Kernel")
    parser.add_argument("--gpu", choices=sorted(DEVICES), required=True)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    profile = KernelProfile.load(asked.gpu).burst().cold()
    ledger = KernelLedger(activate(device_spec(asked.gpu)), ModelledKernels(profile=profile))
    scripts = asked.liger.absolute() / "benchmark" / "scripts"
    sys.path.insert(0, str(scripts))
    note = f"prismscale {our_commit()}"
    found = [replace(row, note=note) for row in measure(scripts, asked.truth, asked.gpu)]
    rows = renewed(read_rows(asked.json), found)
    if asked.json:
        write_rows(rows, asked.json)
    code = finish(rows, title="Liger's Triton kernels", json_path=asked.json)
    del ledger  # until here the device had a pointer to it
    return code


if __name__ == "__main__":
    sys.exit(main())
