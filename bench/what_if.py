"""What-ifs beside the change that was really made: step against step.

    python bench/what_if.py [--part 'null | *']… [--json PATH] [--keep FOLDER]

A program is captured as it is and as a user would change it (``programs/llama_variants.py``), both
through ``prismscale run``; ``prismscale what-if`` says of the first what the second takes. The part
``titan`` needs torchtitan 0.3.0 and tokenizers beside prismscale. ``gloo`` measures on this
machine, which should have nothing else to do: captures of both programs are made in turn, and
medians compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from null_programs import prepare
from one_truth_programs import titan
from parts import Part, run_parts
from prismscale.cluster import Cluster
from prismscale.validation.rows import Row
from runs import HERE, Runs, folder_name, is_installed

LIMIT_S = 1800
BAR = 2.0
"""Percent of the changed program's step."""
AGAINST = "what-if against the change"
FAILED = Row.at_most(AGAINST, float("nan"), BAR, "%")
TITAN_RANKS = 64
VARIANTS = HERE / "programs" / "llama_variants.py"
SHAPE = "--model 1b --layers 4 --seq-len 4096 --batch-size 2 --dtype bf16"
TENSOR = f"{SHAPE} --tp 8"
PIPELINE = "--model 1b --layers 8 --seq-len 2048 --dtype bf16 --tp 8 --pp 4 --microbatches 8"
TURNS = 5
"""Captures of each program on gloo."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change, and the what-ifs that stand for it."""

    name: str
    world_size: int
    args: str
    """Of the program, in both."""
    what_ifs: tuple[str, ...] = ()
    before: str = ""
    """Variants of the program as it is."""
    after: str = ""
    """Variants of the changed one."""
    link: Mapping[str, float] = field(default_factory=dict)
    """Factor on a link of the changed cluster."""
    is_kernels: bool = False
    """What-ifs are the ratios of what the kernels of both programs take: who asks what a faster
    kernel would do knows how fast it is."""


CASES = (
    Case(
        name="overlap off, FSDP2",
        world_size=64,
        args=SHAPE,
        after="--blocking",
        what_ifs=("overlap=default_pg off",),
    ),
    Case(
        name="overlap off, FSDP2 × TP",
        world_size=64,
        args=TENSOR,
        after="--blocking",
        what_ifs=("overlap=mesh_dp off",),
    ),
    Case(
        name="overlap off, FSDP2 × TP",
        world_size=1024,
        args=TENSOR,
        after="--blocking",
        what_ifs=("overlap=mesh_dp off",),
    ),
    Case(
        name="overlap off, DDP",
        world_size=64,
        args=f"{SHAPE} --dp-mode ddp",
        after="--blocking",
        what_ifs=("overlap=default_pg off",),
    ),
    Case(
        name="network × 2, FSDP2",
        world_size=64,
        args=SHAPE,
        link={"inter_node": 2.0},
        what_ifs=("link=network x2",),
    ),
    Case(
        name="NVLink × 2 and network × 0.5, FSDP2 × TP",
        world_size=1024,
        args=TENSOR,
        link={"intra_node": 2.0, "inter_node": 0.5},
        what_ifs=("link=nvlink x2", "link=network x0.5"),
    ),
    Case(
        name="network × 0.25, pipeline of 4 stages × FSDP2 × TP",
        world_size=256,
        args=PIPELINE,
        link={"inter_node": 0.25},
        what_ifs=("link=network x0.25",),
    ),
    Case(
        # torch has no memory-efficient kernel for grouped queries: a model without them.
        name="attention: flash to efficient, 160m",
        world_size=64,
        args="--model 160m --batch-size 8 --dtype bf16",
        before="--attention flash",
        after="--attention efficient",
        is_kernels=True,
    ),
    Case(
        name="attention: flash to cuDNN's",
        world_size=64,
        args=SHAPE,
        before="--attention flash",
        after="--attention cudnn",
        is_kernels=True,
    ),
    Case(
        name="attention: flash to products and softmax",
        world_size=64,
        args=SHAPE,
        before="--attention flash",
        after="--attention math",
        is_kernels=True,
    ),
    Case(
        name="checkpointing off, FSDP2",
        world_size=64,
        args=SHAPE,
        before="--checkpoint",
        what_ifs=("recompute=off",),
    ),
    Case(
        name="checkpointing off, FSDP2 × TP",
        world_size=1024,
        args=TENSOR,
        before="--checkpoint",
        what_ifs=("recompute=off",),
    ),
    Case(
        name="checkpointing and overlap off, network × 2, FSDP2 × TP",
        world_size=64,
        args=TENSOR,
        before="--checkpoint",
        after="--blocking",
        link={"inter_node": 2.0},
        what_ifs=("recompute=off", "overlap=mesh_dp off", "link=network x2"),
    ),
    Case(
        name="tensor parallelism over nodes, data parallelism in them",
        world_size=64,
        args=TENSOR,
        after="--tp-outermost",
        what_ifs=("group=mesh_tp on network", "group=mesh_dp on nvlink"),
    ),
)


def null_rows(case: Case, folder: Path) -> list[Row]:
    """One case on null H100s."""
    runs = Runs(folder, limit_s=LIMIT_S)
    before = _captured(runs, case, case.before, "h100-sxm")
    changed = _captured(runs, case, case.after, _cluster(runs, case))
    return _rows(runs, before, changed, case.what_ifs or _kernel_ratios(before, changed))


def _captured(runs: Runs, case: Case, variants: str, cluster: str) -> dict[str, Any]:
    """Results of a run, with its folder."""
    script = (VARIANTS, *variants.split(), "--", *case.args.split())
    # One name for one run: cases share their bases.
    name = folder_name(f"{case.world_size} {Path(cluster).stem} {variants} {case.args}")
    options = ("--device", "null", "--cluster", cluster, "--world-size", case.world_size)
    return {**runs.run(name, options, script), "folder": name}


def _cluster(runs: Runs, case: Case) -> str:
    """A cluster file with the changed links."""
    if not case.link:
        return "h100-sxm"
    cluster = Cluster.load("h100-sxm")
    for name, factor in case.link.items():
        link = getattr(cluster, name)
        rate = link.bandwidth_bytes_per_s * factor
        cluster = replace(cluster, **{name: replace(link, bandwidth_bytes_per_s=rate)})
    path = runs.folder / f"{folder_name(' '.join(f'{n} {f}' for n, f in case.link.items()))}.toml"
    path.write_text(cluster.to_toml())
    return str(path)


def _kernel_ratios(before: dict[str, Any], changed: dict[str, Any]) -> tuple[str, ...]:
    """``attention`` and ``attention_backward`` over what stands in their place: theirs, and what
    all other kernels take more. Kernels apart from attention are the same in both programs."""
    if not before.get("kernels") or not changed.get("kernels"):
        return ()
    was, then = _attention_ns(before), _attention_ns(changed)
    if then["attention"]:
        return tuple(f"kernel={kind} x{then[kind] / was[kind]:.9f}" for kind in was)
    others = sum(_kernel_ns(changed).values()) - sum(_kernel_ns(before).values())
    factor = (sum(was.values()) + others) / sum(was.values())
    return (f"kernel=attention.* x{factor:.9f}",)


def _attention_ns(found: dict[str, Any]) -> dict[str, int]:
    known = _kernel_ns(found)
    return {kind: known.get(kind, 0) for kind in ("attention", "attention_backward")}


def _kernel_ns(found: dict[str, Any]) -> dict[str, int]:
    return {kernel["kind"]: kernel["device_ns"] for kernel in found["kernels"]}


def _rows(
    runs: Runs, before: dict[str, Any], changed: dict[str, Any], texts: Sequence[str]
) -> list[Row]:
    """What really happened, and how far the what-ifs are off."""
    hoped = _what_if(runs, before["folder"], texts) if before.get("step_ns") and texts else {}
    if not hoped or not changed.get("step_ns"):
        return [FAILED]
    real_ns, was_ns = changed["step_ns"], before["step_ns"]
    off = abs(hoped["after"]["step_ns"] / real_ns - 1) * 100
    return [
        Row.told("the change", (real_ns / was_ns - 1) * 100, "%"),
        Row.at_most(AGAINST, off, BAR, "%"),
    ]


def _what_if(runs: Runs, folder: str, texts: Sequence[str]) -> dict[str, Any]:
    """What the command leaves; empty where it failed."""
    done = runs.command("what-if", folder, *texts, "--draws", 1, "--variability", "none")
    if done.returncode:
        print(f"{folder}: {' '.join(texts)}", done.stderr[-2000:], sep="\n", file=sys.stderr)
        return {}
    results = json.loads((runs.folder / folder / "results.json").read_text())
    return results["forecast"]["what_if"]


def titan_rows(config: str, folder: Path) -> list[Row]:
    """A policy of torchtitan's checkpointing, against none."""
    if not (is_installed("torchtitan") and is_installed("tokenizers")):
        print("left out, torchtitan or tokenizers is not installed")
        return []
    if not (folder / "tokenizer").exists():
        prepare(folder)
    runs = Runs(folder, limit_s=LIMIT_S)
    before, changed = (_titan(runs, name, TITAN_RANKS) for name in (config, "llama3_8b_kept"))
    return _rows(runs, before, changed, ("recompute=off",))


def _titan(runs: Runs, config: str, world_size: int) -> dict[str, Any]:
    """torchtitan with one of ``titan_configs``."""
    program = titan("8B", world_size, config)
    return {**runs.null(config, world_size, program.logging(100)), "folder": config}


GLOO = "--model tiny --layers 4 --batch-size 4 --dp-mode ddp --device cpu --steps 60"
CPU = ("--device", "cpu", "--samples", 16)


def gloo_link(folder: Path) -> list[Row]:
    """The same captures on a cluster with a slower link: no measurement comes between."""
    runs = Runs(folder, limit_s=LIMIT_S)
    cluster = Cluster.load("loopback-gloo")
    link = cluster.intra_node
    slow = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 8)
    path = runs.folder / "slow-gloo.toml"
    path.write_text(replace(cluster, intra_node=slow).to_toml())
    script = (VARIANTS, "--", *GLOO.split())
    steps = {}
    for name in ("loopback-gloo", str(path)):
        options = (*CPU, "--cluster", name, "--world-size", 8)
        # One folder: its captures are used again.
        (runs.folder / "gloo-link" / "results.json").unlink(missing_ok=True)
        steps[name] = runs.run("gloo-link", options, script)
    (runs.folder / "gloo-link" / "results.json").unlink(missing_ok=True)
    options = (*CPU, "--cluster", "loopback-gloo", "--world-size", 8)
    before = {**runs.run("gloo-link", options, script), "folder": "gloo-link"}
    return _rows(runs, before, steps[str(path)], ("link=nvlink x0.125",))


def gloo_overlap(folder: Path) -> list[Row]:
    """Captures in turn; what differs between captures of one program is shown beside."""
    runs = Runs(folder, limit_s=LIMIT_S)
    before: list[int] = []
    changed: list[int] = []
    hoped: list[int] = []
    for turn in range(TURNS):
        for variants, steps in (((), before), (("--blocking",), changed)):
            out = folder_name(f"gloo {turn} {' '.join(variants)}")
            script = (VARIANTS, *variants, "--", *GLOO.split())
            options = (*CPU, "--cluster", "loopback-gloo", "--world-size", 2)
            found = runs.run(out, options, script)
            if found:
                steps.append(found["step_ns"])
            if found and not variants:
                told = _what_if(runs, out, ("overlap=default_pg off",))
                hoped += [told["after"]["step_ns"]] if told else []
    if not (before and changed and hoped):
        return [FAILED]
    was, real, then = (statistics.median(steps) for steps in (before, changed, hoped))
    between = (max(changed) - min(changed)) / 2 / real * 100
    return [
        Row.told("the change", (real / was - 1) * 100, "%"),
        Row.told("captures of the changed program differ by", between, "%"),
        Row.at_most(AGAINST, abs(then / real - 1) * 100, BAR, "%"),
    ]


TITAN = {
    "checkpointing of whole layers": "llama3_8b_checkpointed",
    "checkpointing of cheap operators": "llama3_8b_selective",
}
PARTS: dict[str, Part] = {
    **{f"null | {c.name}, {c.world_size:,} ranks": partial(null_rows, c) for c in CASES},
    **{
        f"titan | 8B, {name} off, {TITAN_RANKS} ranks": partial(titan_rows, config)
        for name, config in TITAN.items()
    },
    "gloo | link × 0.125, DDP, 8 ranks": gloo_link,
    "gloo | overlap off, DDP, 2 ranks": gloo_overlap,
}


if __name__ == "__main__":
    sys.exit(run_parts(PARTS, title="What-ifs beside real changes", doc=__doc__))
