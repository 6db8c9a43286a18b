"""Fit what NCCL's algorithms make of the links, and write it into the cluster presets.

    python tools/fit/fit_collectives.py [--truth DIR] [--write]

Prints the tables of each GPU as TOML with the residuals of the rows that they were fitted to;
``--write`` puts them into ``src/prismscale/cost/profiles``. Which rows are fitted and which are
held out stands in ``prismscale/validation/communication/collective_points.py``; ``prismscale
validate collectives`` scores.

Each stage fits few constants to the logarithm of time, by least squares with a soft loss:

1. all_gather and reduce_scatter on one node: the ring under NCCL's three protocols;
2. all_to_all and send: the kernel of grouped messages;
3. all_reduce on one node: in-switch reduction (of B200 its base alone: a ring does as well on
   nearly all of its rows, which tell nothing more);
4. H100 alone, several nodes: what a step between nodes costs, and the share of the network cards;
   a step inside a node costs more in rings that leave it.

Trees take their ring's constants, but for the share of NVLink that rows with ``NCCL_ALGO=Tree``
show. GPUs without rows on several nodes take H100's constants there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from prismscale.cluster import AlgorithmTuning, Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.graph.node import CollectiveOp
from prismscale.validation.communication.collective_points import (
    CollectivePoint,
    clusters,
    load_points,
)

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "src" / "prismscale" / "cost" / "profiles"
DEFAULT_TRUTH = ROOT / ".." / "shared" / "truth"
PRESETS = {"h100": "h100-sxm", "a100": "a100-80g", "b200": "b200"}
"""Preset files by the GPU whose rows they are fitted to; others stand on these as their base."""
PROTOCOLS = ("", "_ll128", "_ll")
SENDS_FROM = 256 << 20
"""Bytes from which sends of one node were measured without outliers."""
TREE_SHARE = 0.727
"""Of the ring's share of NVLink: rows of one H100 node with ``NCCL_ALGO=Tree``."""
NETWORK_LATENCY_FACTORS = {"": 3.0, "_ll128": 1.48, "_ll": 1.0}
"""Of a step between nodes, by protocol. NCCL's own tuning table has 2.7 µs for LL and 4.0 µs for
LL128 on a network; Simple is where the fit begins."""
B200_IN_SWITCH_SHARE = 0.6
"""Of NVLink: 838.0 GB/s of bus bandwidth for 8 GiB with eight B200 (stas00/ml-engineering,
network/README), the one public row long enough to tell in-switch reduction from a ring."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "base_ns": (500.0, 1e5),
    "latency_factor": (0.05, 30.0),
    "inter_latency_factor": (0.05, 50.0),
    "spanning_latency_factor": (0.05, 50.0),
    "intra_efficiency": (0.01, 1.2),
    "inter_efficiency": (0.1, 1.2),
    "chunk_ns": (1.0, 3e4),
    "chunk_limit_ns": (1e4, 1e8),
    "own_copy": (0.01, 2.0),
}
ONE_NODE = ("base_ns", "latency_factor", "intra_efficiency", "chunk_ns", "own_copy")
IN_SWITCH = ("base_ns", "latency_factor", "intra_efficiency", "chunk_ns", "chunk_limit_ns")
_LOSS_SCALE = 0.03
Constant = tuple[str, str]
"""Algorithm and field."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A cluster under fit and the rows that are its own."""

    cluster: Cluster
    points: Sequence[CollectivePoint]

    def tuned(self, tunings: Mapping[str, Mapping[str, float]]) -> Fit:
        """With other constants."""
        algorithms = dict(self.cluster.algorithms)
        for name, values in tunings.items():
            if name in algorithms:
                algorithms[name] = replace(algorithms[name], **values)
        return replace(self, cluster=replace(self.cluster, algorithms=algorithms))

    def fitted(self, points: Sequence[CollectivePoint], free: Sequence[Constant]) -> Fit:
        """With the ``free`` constants at their best for ``points``."""
        bounds = np.log([BOUNDS[name] for _, name in free])
        at = np.log([getattr(self.cluster.algorithms[a], n) for a, n in free])
        start = np.clip(at, bounds[:, 0] + 0.01, bounds[:, 1] - 0.01)

        def trial(values: np.ndarray) -> Fit:
            found: dict[str, dict[str, float]] = {}
            for (algorithm, name), value in zip(free, values, strict=True):
                found.setdefault(algorithm, {})[name] = float(np.exp(value))
            return self.tuned(found)

        best = least_squares(
            lambda values: log_errors(trial(values).cluster, points),
            start,
            bounds=(bounds[:, 0], bounds[:, 1]),
            loss="soft_l1",
            f_scale=_LOSS_SCALE,
            diff_step=1e-3,
            max_nfev=60,
        )
        return trial(best.x)

    def of(self, *ops: CollectiveOp, nodes: int | None = None) -> list[CollectivePoint]:
        """Rows of these operations; on one node, or (None) on several."""
        return [p for p in self.points if p.op in ops and (p.nodes == 1) == (nodes == 1)]


def main() -> int:
    """Print the tables; exit code 2 where there is no truth."""
    options = _options()
    if not options.truth.is_dir():
        print(f"no public truth at {options.truth}: give it with --truth DIR", file=sys.stderr)
        return 2
    points = [p for p in load_points(options.truth) if p.is_fitted]
    h100 = fit_network(fit_sums(fit_one_node("h100", points), IN_SWITCH))
    known = asdict(h100.cluster.algorithms["hierarchical"])
    in_switch = {n: known[n] for n in IN_SWITCH} | {"intra_efficiency": B200_IN_SWITCH_SHARE}
    b200 = fit_one_node("b200", points).tuned({"hierarchical": in_switch})
    found = {
        "h100": h100,
        "a100": with_network_of(h100, fit_one_node("a100", points)),
        "b200": with_network_of(h100, fit_sums(b200, ("base_ns",))),
    }
    for gpu, fit in found.items():
        text = tables(rounded(fit).cluster)
        print(f"# {gpu}\n{text}\n{residuals(rounded(fit))}\n")
        if options.write:
            write(PROFILES / f"{PRESETS[gpu]}.toml", text, rounded(fit).cluster)
    return 0


def fit_one_node(gpu: str, points: Sequence[CollectivePoint]) -> Fit:
    """The first two stages, on one node of ``gpu``."""
    own = [p for p in points if p.hardware == gpu]
    fit = Fit(cluster=clusters()[gpu], points=own)
    fit = fit.tuned(_start(fit))
    ring = [f"ring{p}" for p in PROTOCOLS]
    gathers = fit.of(CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER, nodes=1)
    limit = [("ring", "chunk_limit_ns")]
    fit = fit.fitted(gathers, [*((a, n) for a in ring for n in ONE_NODE), *limit])
    messages = fit.of(CollectiveOp.ALL_TO_ALL, nodes=1)
    fit = fit.fitted(messages, [("pairwise", n) for n in (*ONE_NODE, "chunk_limit_ns")])
    return _tied(fit)


def fit_sums(fit: Fit, free: Sequence[str]) -> Fit:
    """The stage of in-switch reduction, with these constants of it free."""
    sums = fit.of(CollectiveOp.ALL_REDUCE, nodes=1)
    return fit.fitted(sums, [("hierarchical", name) for name in free])


def fit_network(fit: Fit) -> Fit:
    """The stage on several nodes, and messages from one member to another."""
    network = ("inter_efficiency", "inter_latency_factor")
    several = fit.of(CollectiveOp.ALL_TO_ALL)
    fit = fit.fitted(several, [("pairwise", name) for name in network])
    rings = fit.of(*(op for op in CollectiveOp if not op.is_p2p and op != CollectiveOp.ALL_TO_ALL))
    fit = fit.tuned({"ring": {"spanning_latency_factor": 4.0}})
    fit = _tied(fit.fitted(rings, [("ring", n) for n in (*network, "spanning_latency_factor")]))
    sends = [p for p in fit.points if p.op.is_p2p and p.n_bytes >= SENDS_FROM and p.nodes <= 2]
    return fit.fitted(sends, [("p2p", "intra_efficiency"), ("p2p", "inter_efficiency")])


def with_network_of(h100: Fit, fit: Fit) -> Fit:
    """``fit`` with the constants that several nodes gave H100, and its sends' share of a link."""
    network = ("inter_efficiency", "inter_latency_factor", "spanning_latency_factor")
    given = h100.cluster.algorithms
    tunings = {name: {n: getattr(given[name], n) for n in network} for name in given}
    sends = given["p2p"].intra_efficiency / given["pairwise"].intra_efficiency
    tunings["p2p"]["intra_efficiency"] = sends * fit.cluster.algorithms["pairwise"].intra_efficiency
    return fit.tuned(tunings)


def log_errors(cluster: Cluster, points: Sequence[CollectivePoint]) -> np.ndarray:
    """Logarithm of modelled over measured time, of each point."""
    model = AnalyticCollectiveModel(cluster)
    return np.log([model.time_ns(p.op, p.n_bytes, p.footprint) / p.time_ns for p in points])


def rounded(fit: Fit) -> Fit:
    """As it is printed: three digits."""
    return fit.tuned(
        {
            name: {f: float(f"{v:.3g}") for f, v in _values(tuning).items() if v is not None}
            for name, tuning in fit.cluster.algorithms.items()
        }
    )


def tables(cluster: Cluster) -> str:
    """The algorithms of ``cluster`` as TOML."""
    blocks = []
    for name, tuning in cluster.algorithms.items():
        lines = [
            f"{key} = {_number(key, v)}" for key, v in _values(tuning).items() if v is not None
        ]
        if tuning.min_members_per_node > 1:
            lines.append(f"min_members_per_node = {tuning.min_members_per_node}")
        blocks.append("\n".join([f"[algorithms.{name}]", *lines]))
    return "\n\n".join(blocks)


def residuals(fit: Fit) -> str:
    """Errors of the rows that ``fit`` was fitted to, as comments."""
    lines = []
    for op in dict.fromkeys(p.op for p in fit.points):
        for nodes in (1, None):
            points = fit.of(op, nodes=nodes)
            if not points:
                continue
            errors = np.expm1(log_errors(fit.cluster, points))
            median, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
            place = "one node" if nodes == 1 else "several nodes"
            lines.append(
                f"# {op.spelling}, {place}: {len(points)} rows, bias {np.median(errors):+.1%}, "
                f"median {median:.1%}, p90 {p90:.1%}"
            )
    return "\n".join(lines)


def write(path: Path, text: str, cluster: Cluster) -> None:
    """Put the tables and the network's latency into a preset; the rest of the file stays."""
    old = path.read_text()
    new = re.sub(r"\[algorithms\..*?(?=\[sources\])", lambda _: text + "\n\n", old, flags=re.DOTALL)
    latency = f"{cluster.inter_node.latency_ns:_.0f}"
    new = re.sub(r"(\[inter_node\]\nlatency_ns = )[\d_]+", rf"\g<1>{latency}", new)
    path.write_text(new)


def _start(fit: Fit) -> dict[str, dict[str, float]]:
    """Where a fit begins: latencies from the smallest messages of 2 and 8 GPUs."""
    t2, t8 = (_smallest(fit, CollectiveOp.ALL_GATHER, n) for n in (2, 8))
    step = (t8 - t2) / 6
    base, factor = t2 - step, step / fit.cluster.intra_node.latency_ns
    ring = {
        "": {"base_ns": base + 2_500, "own_copy": 0.4, "chunk_ns": 2_000, "intra_efficiency": 0.8},
        "_ll128": {"base_ns": base + 500, "own_copy": 0.5, "chunk_ns": 20, "intra_efficiency": 0.5},
        "_ll": {"base_ns": base, "own_copy": 0.3, "chunk_ns": 15, "intra_efficiency": 0.03},
    }
    start = {
        f"ring{p}": {**ring[p], "latency_factor": factor, "inter_latency_factor": network}
        for p, network in NETWORK_LATENCY_FACTORS.items()
    }
    # Out of one node's way until they take their ring's constants.
    start.update({f"tree{p}": {"base_ns": 1e6} for p in PROTOCOLS})
    start["pairwise"] = {
        "base_ns": _smallest(fit, CollectiveOp.ALL_TO_ALL, 2),
        "latency_factor": 0.2,
        "inter_latency_factor": 0.5,
        "own_copy": 0.2,
        "chunk_ns": 500,
        "intra_efficiency": 0.8,
    }
    start["hierarchical"] = {
        "base_ns": _smallest(fit, CollectiveOp.ALL_REDUCE, 8),
        "latency_factor": 3.0,
        "intra_efficiency": 0.65,
        "chunk_ns": 1_500,
    }
    return start


def _smallest(fit: Fit, op: CollectiveOp, n_ranks: int) -> float:
    return min((p.n_bytes, p.time_ns) for p in fit.of(op, nodes=1) if p.n_ranks == n_ranks)[1]


def _tied(fit: Fit) -> Fit:
    """Constants that others give: of trees, their ring's; of messages, those of grouped ones."""
    known = fit.cluster.algorithms
    tunings: dict[str, dict[str, float]] = {}
    for protocol in PROTOCOLS:
        ring = _values(known[f"ring{protocol}"])
        share = {"intra_efficiency": TREE_SHARE * ring["intra_efficiency"], "own_copy": 0.0}
        tunings[f"tree{protocol}"] = {**ring, **share}
    message = _values(known["pairwise"])
    tunings["rooted"] = message
    shares = ("intra_efficiency", "inter_efficiency", "own_copy")
    tunings["p2p"] = {k: v for k, v in message.items() if k not in shares}
    network = ("inter_efficiency", "inter_latency_factor")
    tunings["hierarchical"] = {n: getattr(known["ring"], n) for n in network}
    return fit.tuned(tunings)


def _values(tuning: AlgorithmTuning) -> dict[str, float]:
    return {
        f.name: getattr(tuning, f.name)
        for f in fields(AlgorithmTuning)
        if f.name != "min_members_per_node"
    }


def _number(name: str, value: float) -> str:
    return f"{value:_.0f}" if name.endswith("_ns") and value >= 100 else f"{value:.3g}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--write", action="store_true", help="change the presets")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
