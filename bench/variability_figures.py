"""Where the figures of the variability profile ``measured`` come from.

    python bench/variability_figures.py --truth DIR

Prints each figure of the profile beside what public measurements in DIR give for it. Of MLPerf,
Llama-3.1 8B and Llama-2 70B LoRA are read; for long stalls alone GPT-3 and Llama-3.1 405B, on which
forecasts are scored with the long stalls of the other (``long_stalls``).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from long_stalls import GPT3, LLAMA, SCORED, LongStalls
from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.samples import StepSamples
from prismscale.formats.straggler import read_straggler
from prismscale.graph.node import NodeKind
from prismscale.validation.mlperf import WARM_UP_STEPS, read_runs
from prismscale.validation.rows import Row, finish

Floats = NDArray[np.float64]
OUTLIER_MADS = 6.0
WARM_UP = 5
LONG_S = 30.0
"""Of a block of steps: the noise of single steps has averaged out."""
SLOW = 1.5
"""Times its median, from which on a communication counts as stalled."""


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    profile = VariabilityProfile.load("measured")
    rows = [
        *_kernels(options.truth, profile),
        *_traces(options.truth / "straggler", profile),
        *_links(options.truth, profile),
        *_steps(options.truth / "mlperf", profile),
        *_long_stalls(options.truth / "mlperf", profile),
    ]
    return finish(rows, title="Figures of the profile 'measured'", json_path=options.json)


def _beside(name: str, ours: float, measured: float, unit: str = "") -> list[Row]:
    return [Row.told(f"{name}: profile", ours, unit), Row.told(f"{name}: measured", measured, unit)]


def _table(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="", encoding="utf-8") as text:
        yield from csv.DictReader(text)


def _kernels(truth: Path, profile: VariabilityProfile) -> list[Row]:
    """Spread of one kernel of 50 µs and more over some 20 repetitions (Vidur), and in training and
    inference traces (TraceLens, 20 µs and more, at least ten times)."""
    vidur: dict[str, list[float]] = defaultdict(list)
    for path in sorted((truth / "vidur").glob("compute__*.csv.gz")):
        for row in _table(path):
            for name in (key.split(".")[1] for key in row if key.endswith(".mean")):
                mean = float(row[f"time_stats.{name}.mean"] or 0)
                if mean >= 0.05:
                    kind = "gemm" if "proj" in name else "memory"
                    vidur[kind].append(float(row[f"time_stats.{name}.std"]) / mean)
    lens: dict[str, list[float]] = defaultdict(list)
    for row in _table(truth / "tracelens" / "op_kernel_times_h100_mi300.csv.gz"):
        mean = float(row["Kernel Time_us_mean"] or 0)
        enough = float(row["operation_count"]) >= 10 and mean >= 20 and row["gpu"] == "h100"
        if enough and row["Kernel Time_us_std"]:
            lens[row["op category"]].append(float(row["Kernel Time_us_std"]) / mean)
    of = profile.kernel
    return [
        *_beside("GEMM over time, Vidur", of("gemm").temporal_cv, float(np.median(vidur["gemm"]))),
        *_beside(
            "GEMM over time, TraceLens", of("gemm").temporal_cv, float(np.median(lens["GEMM"]))
        ),
        *_beside(
            "attention over time, TraceLens",
            of("attention").temporal_cv,
            float(np.median(lens["SDPA_fwd"])),
        ),
        *_beside(
            "norms, elementwise over time, Vidur",
            of("norm").temporal_cv,
            float(np.median(vidur["memory"])),
        ),
    ]


def _traces(folder: Path, profile: VariabilityProfile) -> list[Row]:
    """ByteDance's production traces, waiting taken out, without their first steps: in those of ST
    all eight all-reduces of the embedding take 27 times their median."""
    st, se = (read_straggler(folder / f"trace-{name}.parquet").samples for name in ("ST", "SE"))
    ratios = np.concatenate([*_message_ratios(st), *_message_ratios(se)])
    slow = ratios[ratios > SLOW]
    robust = [_robust_cv(r) for s in (st, se) for r in _message_ratios(s)]
    total_T = np.sum([a.sum(axis=1) for a in _collectives(se)], axis=0)
    share = _node_share(se)
    pods, small = profile.link("pods"), profile.kernel("optimizer")
    between = _spatial_cv(st, "optimizer")
    return [
        *_beside("memory-bound kernels between workers (ST)", small.spatial_cv, between),
        Row.told("microbatches between workers (SE), forward", _spatial_cv(se, "forward-compute")),
        *_beside("share of that between nodes (SE)", profile.node_share, share),
        *_beside("communication across pods over time", pods.temporal_cv, float(np.median(robust))),
        *_beside("communication across pods, share stalled", pods.tail_probability,
                 len(slow) / len(ratios)),
        *_beside("communication across pods, stalled", pods.tail_factor, float(slow.mean()), "×"),
        *_beside("all collectives of a step (SE)", profile.regimes.communication_cv,
                 _robust_cv(total_T / np.median(total_T))),
    ]  # fmt: skip


def _communications(samples: StepSamples) -> Iterator[tuple[NodeKind, NDArray[np.int64]]]:
    """Of 1 ms and more, by group; barriers and the clipping, which are one number, are left out."""
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        for node, ns_TG in enumerate(own.body_ns):
            signature = samples.signature(rank_class.index, node)
            warm_TG = ns_TG[WARM_UP_STEPS:]
            is_one = "barrier" in signature.label or "clip" in signature.label
            if signature.kind != NodeKind.COMPUTE and warm_TG.mean() > 1e6 and not is_one:
                yield signature.kind, warm_TG


def _message_ratios(samples: StepSamples) -> Iterator[Floats]:
    for _, ns_TG in _communications(samples):
        yield (ns_TG / np.median(ns_TG, axis=0)).ravel()


def _collectives(samples: StepSamples) -> Iterator[Floats]:
    for kind, ns_TG in _communications(samples):
        if kind == NodeKind.COLLECTIVE:
            yield ns_TG.astype(np.float64)


def _medians(samples: StepSamples, label: str) -> list[Floats]:
    """By class, the mean over its nodes of each worker's median duration."""
    found = []
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        of = [
            np.median(ns_TC[WARM_UP_STEPS:], axis=0)
            for node, ns_TC in enumerate(own.body_ns)
            if samples.signature(rank_class.index, node).label == label and ns_TC.shape[1] > 1
        ]
        if of:
            found.append(np.mean(of, axis=0))
    return found


def _spatial_cv(samples: StepSamples, label: str) -> float:
    return float(np.median([m.std(ddof=1) / m.mean() for m in _medians(samples, label)]))


def _node_share(samples: StepSamples, per_node: int = 4) -> float:
    """Intraclass correlation of neighbouring workers (one-way analysis of variance): SE's workers
    are pairs of GPUs, four to a node of eight."""
    shares = []
    for label in ("forward-compute", "backward-compute"):
        for median in _medians(samples, label):
            whole = median[: len(median) // per_node * per_node].reshape(-1, per_node)
            within = whole.var(axis=1, ddof=1).mean()
            between = max(whole.mean(axis=1).var(ddof=1) - within / per_node, 0.0)
            shares.append(between / (between + within))
    return float(np.mean(shares))


def _robust_cv(ratio: Floats) -> float:
    return float(1.4826 * np.median(np.abs(ratio - np.median(ratio))) / np.median(ratio))


def _links(truth: Path, profile: VariabilityProfile) -> list[Row]:
    """Repeated all-reduces of 4 MiB and more (Vidur), and pairs of nodes of one healthy cluster
    (nccl-tests, example-cluster01)."""
    spread: dict[str, list[float]] = defaultdict(list)
    for path in sorted((truth / "vidur").glob("network__*__all_reduce.csv.gz")):
        for row in _table(path):
            if float(row["size"]) >= 2**22:
                scope = "nvlink" if row["num_workers"] == row["devices_per_node"] else "rail"
                mean = float(row["time_stats.all_reduce.mean"])
                spread[scope].append(float(row["time_stats.all_reduce.std"]) / mean)
    pairs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in _table(truth / "nccl" / "nccl_tests.csv.gz"):
        found = re.fullmatch(r"pairwise\|example-cluster01\|N2_G(\d)_.*", row["config"])
        if found:
            key = (row["collective"], found[1], row["size_bytes"])
            pairs[key].append(float(row["time_us"]))
    between = [_robust_cv(np.array(times)) for times in pairs.values()]
    nvlink, rail = profile.link("nvlink"), profile.link("rail")
    return [
        *_beside("NVLink over time", nvlink.temporal_cv, float(np.median(spread["nvlink"]))),
        *_beside("rails over time", rail.temporal_cv, float(np.median(spread["rail"]))),
        *_beside("pairs of nodes", rail.pair_cv, float(np.median(between))),
    ]


def _steps(folder: Path, profile: VariabilityProfile) -> list[Row]:
    """Whole jobs: the noise of a step, what is left of it over minutes, and stalls."""
    nodes = {}
    with (folder / "mlperf_llm_runs.csv").open(newline="", encoding="utf-8") as text:
        for row in csv.DictReader(text):
            nodes[row["run_id"]] = float(row["n_nodes"] or 1)
    series: dict[str, list[float]] = defaultdict(list)
    for row in _table(folder / "steps" / "v5.1_llama31_8b.csv.gz"):
        series[row["run_id"]].append(float(row["step_time_s"]))
    of_one_second, stalls_s, node_s = [], [], 0.0
    for run, steps in series.items():
        steps_s = np.array(steps[WARM_UP:])
        usual = float(np.median(steps_s))
        off = steps_s - usual
        limit = OUTLIER_MADS * 1.4826 * float(np.median(np.abs(off)))
        quiet = steps_s[np.abs(off) <= limit]
        of_one_second.append(quiet.std() / usual * np.sqrt(usual))
        if (off > limit).mean() < 0.01:  # the others have something that comes often
            stalls_s += off[off > limit].tolist()
            node_s += float(steps_s.sum()) * nodes[run]
    one_second = float(np.median(of_one_second))
    drifts = [
        float(np.sqrt(max(cv**2 - one_second**2 / block_s, 0.0)))
        for block_s, cv in _blocks(folder / "steps")
        if block_s >= LONG_S
    ]
    own = profile.regimes
    return [
        *_beside("a step of one second", own.cv_of_one_second, one_second),
        *_beside("from minute to minute", own.drift_cv, float(np.median(drifts))),
        *_beside("stalls", profile.stalls.per_node_hour, len(stalls_s) / node_s * 3600, "/node/h"),
        *_beside("stalls", profile.stalls.mean_s, float(np.mean(stalls_s)), "s"),
        Row.told("stalls that were seen", len(stalls_s)),
    ]


def _long_stalls(folder: Path, profile: VariabilityProfile) -> list[Row]:
    """Of both jobs for the profile, and of each for the other's score."""
    runs = read_runs(folder)
    own = {b: LongStalls.of(r for r in runs if r.bench == b) for b in (GPT3, LLAMA)}
    figures = [
        ("", profile.stalls, LongStalls.of(runs)),
        (", of GPT-3 for 405B", SCORED[LLAMA], own[GPT3]),
        (", of 405B for GPT-3", SCORED[GPT3], own[LLAMA]),
    ]
    rows = []
    for name, ours, found in figures:
        rows += [
            *_beside(f"long stalls{name}", ours.long_per_job_hour, found.per_job_hour, "/job/h"),
            *_beside(f"long stalls{name}", ours.long_mean_s, found.mean_s, "s"),
            Row.told(f"long stalls that were seen{name}", found.count),
        ]
    return rows


def _blocks(folder: Path) -> Iterator[tuple[float, float]]:
    """Seconds of a block of steps, and the CV of its pace over a run's blocks but the first."""
    names = ("v5.1_llama31_8b_blocks", *(p.name[:-7] for p in folder.glob("*lora_blocks.csv.gz")))
    for name in names:
        blocks: Mapping[str, list[tuple[float, float]]] = defaultdict(list)
        for row in _table(folder / f"{name}.csv.gz"):
            if row["kind"] == "block_wall_s":
                blocks[row["run_id"]].append((float(row["samples"]), float(row["value_s"])))
        for found in blocks.values():
            yield from _paces(found)


def _paces(blocks: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    samples, wall_s = np.array(blocks).T
    done = np.diff(samples)
    if len(done) < 4 or (done <= 0).any() or (wall_s <= 0).any():
        return
    pace = wall_s[1:] / done
    yield float(np.median(wall_s)), float(pace.std(ddof=1) / pace.mean())


if __name__ == "__main__":
    sys.exit(main())
