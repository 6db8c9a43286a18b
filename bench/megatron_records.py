"""Megatron-LM's own records of a GPT's peak memory, and their runs as options of our example.

A case is a folder with ``model_config.yaml``, the command line, and ``golden_*h100*.json.gz``, what
8 x H100 logged at every step. The logging rank is the last one.

Cases of Transformer Engine's layers (``--transformer-impl transformer_engine``) count where the
example knows all their options and the libraries' Python code is installed.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "megatron"))

from arguments import CHOICES, FLAGS, INTEGERS, NUMBERS

STEPS = 3
RESUMED_AT = 51
# Data, logs, checkpoints, and what only the newer code has: no part of the memory of a step.
IGNORED = (
    "log-",
    "tensorboard-",
    "data-",
    "ckpt-",
    "dist-ckpt-",
    "save",
    "load",
    "eval-",
    "lr-",
    "min-lr",
    "vocab-file",
    "merge-file",
    "split",
    "train-iters",
    "timing-",
    "use-persistent-ckpt-worker",
    "verify-integrity",
    "use-checkpoint-opt_param-scheduler",
    "use-mcore-models",
    "distributed-backend",
    "exit-interval",
    "bf16-",
    "tokenizer-type",
    "mock-data",
    "no-mmap-bin-files",
    "no-ckpt-fully-parallel-save",
    "async-",
    "fim-",
    "decoupled-",
    "calculate-per-token-loss",
    "ddp-average-in-collective",
    "use-checkpoint-args",
    "attention-softmax-in-fp32",
)
KNOWN = {*FLAGS, *INTEGERS, *NUMBERS, *CHOICES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One recorded run."""

    name: str
    options: tuple[str, ...]
    """Of ``examples/megatron/train.py``."""
    environment: Mapping[str, str]
    first_peak_bytes: int
    steady_peak_bytes: int
    """The highest before the run was resumed from a checkpoint."""


def load_cases(folder: Path) -> Iterator[Case]:
    """GPT cases that the example can run, by name."""
    for path in sorted(folder.glob("*/gpt3*/golden_*h100*.json.gz")):
        sections = _sections(path.with_name("model_config.yaml").read_text(encoding="utf-8"))
        arguments = sections["MODEL_ARGS"]
        options = {k: v for k, v in arguments.items() if not k.startswith(IGNORED)}
        with gzip.open(path, "rt", encoding="utf-8") as file:
            peaks = json.load(file).get("mem-max-allocated-bytes", {}).get("values", {})
        if not peaks or not _can_run(options):
            continue
        steady = [int(peak) for step, peak in peaks.items() if int(step) < RESUMED_AT]
        yield Case(
            name=path.parent.name,
            options=tuple(_example_options(options, arguments)),
            environment=sections["ENV_VARS"],
            first_peak_bytes=int(peaks["1"]),
            steady_peak_bytes=max(steady),
        )


def _can_run(options: Mapping[str, str]) -> bool:
    """Whether the example knows all options of Transformer Engine's layers, and what they need is
    installed."""
    if options.get("transformer-impl") == "local":
        return True
    needed = ["transformer_engine"]
    if options.get("attention-backend") == "flash":
        needed += ["flash_attn"]
    return KNOWN.issuperset(options) and all(find_spec(name) is not None for name in needed)


def _sections(text: str) -> dict[str, dict[str, str]]:
    """Two levels of ``key: value``, which is all of YAML that the files use."""
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if not line.startswith(" "):
            current = sections.setdefault(key, {})
        else:
            current[key.strip().removeprefix("--")] = value.partition(" #")[0].strip()
    return sections


def _example_options(options: Mapping[str, str], arguments: Mapping[str, str]) -> Iterator[str]:
    if "log-num-zeros-in-grad" in arguments:
        yield "--log-num-zeros-in-grad"
    for name, value in options.items():
        yield f"--{name}"
        if value != "true":
            yield value
    yield from ("--train-iters", str(STEPS))
