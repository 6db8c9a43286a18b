"""What a forecast starts from: the recorded steps of a run folder, captured or imported."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import has_samples, load_samples
from prismscale.errors import UsageError
from prismscale.forecast.fitting import FittedPool, fit_laws
from prismscale.forecast.lockstep import FusedGraph, fuse
from prismscale.forecast.montecarlo import DrawSource
from prismscale.forecast.replay import ReplayDraws, fit_step_regimes
from prismscale.forecast.sampling import LawDraws, fuse_laws
from prismscale.forecast.variation import Variation
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.graph.store import load_graph

ENOUGH_STEPS = 16
"""Recorded steps from which on they are recombined as they are; fewer are extended by fitted
laws."""
METHODS = ("auto", "steps", "laws")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Samples with a duration for every node."""

    samples: StepSamples
    modelled: frozenset[tuple[int, int]] = frozenset()
    """(class, body node) of communication whose time is a model's."""
    variation: Variation = field(default_factory=Variation)
    """How unsteady that is."""
    notes: tuple[str, ...] = ()
    """Where durations come from, for people."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A graph and the law of its durations."""

    graph: JobGraph
    source: LawDraws | ReplayDraws
    whole: LawDraws | None = None
    """The laws of the graph that :attr:`graph` was fused from; None where nothing was fused."""
    fused: FusedGraph | None = None
    fitted: tuple[FittedPool, ...] = ()
    notes: tuple[str, ...] = ()


def load_recording(
    folder: Path, cluster: str | None, variation: Variation | None = None
) -> Recording:
    """The recorded steps in a run folder; communication that was not measured gets its time from
    the cluster's model.

    Args:
        folder: a run folder, or the folder of a graph itself.
        cluster: preset or TOML file; needed where communication was not measured and the run does
            not name a preset.
        variation: how unsteady communication is that was not measured; None is the default.

    Raises:
        UsageError: no graph there, or a cluster is needed and none was given.
        FormatError: damaged files.
    """
    graph_folder = folder / "graph" if (folder / "graph").is_dir() else folder
    if has_samples(graph_folder):
        return Recording(samples=load_samples(graph_folder))
    samples = StepSamples.from_graph(load_graph(graph_folder))
    missing = _unmeasured(samples)
    if not missing:
        return Recording(samples=samples)
    cluster = cluster or cluster_of(folder)
    if cluster is None:
        raise UsageError(
            f"{len(missing)} communications of {folder} have no measured time; name the cluster "
            "whose model is to answer (--cluster h100-sxm)"
        )
    loaded = Cluster.load(cluster)
    filled = with_modelled_communication(samples, loaded)
    assumed = variation or Variation()
    note = (
        f"{len(missing)} communications take their time from the model of {loaded.name}, varied "
        f"by {assumed.communication_cv:.1%} (assumed)"
    )
    if assumed.stall_probability:
        note += f", {assumed.stall_probability:.2g} of them stalled"
    return Recording(samples=filled, modelled=frozenset(missing), variation=assumed, notes=(note,))


def with_modelled_communication(samples: StepSamples, cluster: Cluster) -> StepSamples:
    """The same samples; a communication whose recorded times are all 0 gets the model's."""
    durations = GraphDurations(graph=samples.graph, model=collective_model(cluster))
    classes = list(samples.classes)
    for class_index, node in _unmeasured(samples):
        own = classes[class_index]
        trace = samples.graph.classes[class_index].trace
        modelled = durations.communication_ns(class_index, trace.n_prologue + node)
        body = list(own.body_ns)
        body[node] = np.broadcast_to(modelled, (samples.n_steps, len(modelled)))
        classes[class_index] = replace(own, body_ns=tuple(body))
    return replace(samples, classes=tuple(classes))


def model_of(recording: Recording, *, method: str = "auto", fused: bool = True) -> Model:
    """How durations are drawn: recorded steps recombined, or laws fitted to pools.

    Args:
        method: ``steps``, ``laws``, or ``auto``: steps where there are :data:`ENOUGH_STEPS`.
        fused: fuse ranks that move in lockstep (only with laws).

    Raises:
        UsageError: an unknown method. FormatError: impossible durations.
    """
    if method not in METHODS:
        raise UsageError(f"unknown method '{method}'; allowed: {', '.join(METHODS)}")
    samples = recording.samples
    if method == "auto":
        method = "steps" if samples.n_steps >= ENOUGH_STEPS else "laws"
    if method == "steps":
        regimes = fit_step_regimes(samples)
        count = len(np.unique(regimes.state_S))
        note = f"{samples.n_steps} recorded steps recombined, {count} regime(s)"
        source = ReplayDraws(
            samples=samples,
            regime_T=regimes.state_S,
            regimes=regimes,
            modelled=recording.modelled,
            modelled_factor=recording.variation.communication(1.0) if recording.modelled else None,
        )
        return Model(graph=samples.graph, source=source, notes=(*recording.notes, note))
    laws, fitted = fit_laws(samples, modelled=recording.modelled, variation=recording.variation)
    notes = (*recording.notes, f"{len(fitted)} fitted pools", *laws.notes)
    small = fuse(samples.graph) if fused else None
    if small is None:
        return Model(graph=samples.graph, source=laws, fitted=tuple(fitted), notes=notes)
    notes = (*notes, f"lockstep sets of {small.set_size} ranks drawn as one")
    return Model(
        graph=small.graph,
        source=fuse_laws(small, laws),
        whole=laws,
        fused=small,
        fitted=tuple(fitted),
        notes=notes,
    )


def with_factors(source: LawDraws | ReplayDraws, factor_R: np.ndarray) -> DrawSource:
    """The same draws with each rank's computation multiplied by a further factor."""
    if isinstance(source, LawDraws) and source.factor_R is not None:
        factor_R = factor_R * source.factor_R
    return replace(source, factor_R=factor_R)


def cluster_of(folder: Path) -> str | None:
    """The cluster that a captured run was simulated for, where it is a preset."""
    try:
        name = json.loads((folder / "results.json").read_text(encoding="utf-8")).get("cluster")
    except (OSError, ValueError, AttributeError):
        return None
    return name if name in Cluster.presets() else None


def _unmeasured(samples: StepSamples) -> list[tuple[int, int]]:
    """(class, body node) of communications without any recorded time, zero bytes included."""
    found = []
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        kinds = rank_class.trace.kind_N[rank_class.trace.n_prologue :]
        for node, ns_TX in enumerate(own.body_ns):
            if kinds[node] != NodeKind.COMPUTE and not ns_TX.any():
                found.append((rank_class.index, node))
    return found
