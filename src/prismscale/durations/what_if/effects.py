"""What a what-if touches, and its share of the step. A what-if that touches nothing is refused.

Axes: ``B`` body nodes of a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_changes import HostFactor, KernelChange, KernelFactor
from prismscale.durations.altered import Alteration, labelled_nodes
from prismscale.durations.recosting import recomputed_nodes
from prismscale.durations.source import DurationSource
from prismscale.durations.what_if.blocking import blocking
from prismscale.durations.what_if.forms import (
    LINKS,
    ComputeShared,
    GroupOn,
    LinkSpeed,
    LinksShared,
    OverlapOff,
    RecomputeOff,
    WhatIf,
)
from prismscale.durations.what_if.launched import Launched
from prismscale.durations.what_if.meant_groups import group_labels, meant_nodes
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph, RankClass

MOST_NAMED = 4
MOST_LISTED = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What one what-if touches in the job without what-ifs."""

    text: str
    """The what-if as it was written."""
    touches: str
    """What it touches and how often, in words."""
    count: int
    """Kernels or communications touched in a step, on the rank that has most of them."""
    share: float
    """Time of what is touched on a rank over the step time, averaged over ranks. Work that overlaps
    with other work counts in full."""

    def sentence(self) -> str:
        """Return the effect as a sentence for notes."""
        return f"what if {self.text}: {self.touches}, {self.share:.1%} of the step"


@dataclass(kw_only=True)
class _Found:
    """What a what-if touches, class by class."""

    names: list[Counter[str]] = field(default_factory=list)
    """Names of what is touched, with their counts in a step."""
    ns: list[float] = field(default_factory=list)
    """Time of what is touched in a step."""

    def add(self, names: Counter[str], ns: float) -> None:
        """Append one class."""
        self.names.append(names)
        self.ns.append(ns)

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is touched in any class."""
        return not any(names.total() for names in self.names)


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Finds what each what-if would touch in a job."""

    alteration: Alteration
    """Changes of the scenario without the what-ifs."""
    graph: JobGraph
    """The job's graph after :attr:`alteration`."""
    durations: DurationSource
    step_ns: int
    shared_ns: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Time that communications would take longer if groups shared the links (``[B]``), by class."""
    beside_ns: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Time that computation would take longer beside communications (``[B]``), by class."""

    def of(self, what_if: WhatIf) -> Effect:
        """Return what ``what_if`` touches.

        Raises:
            UsageError: it touches nothing; the message says what there is to touch.
        """
        form, unit = what_if.form, "communications"
        if isinstance(form, OverlapOff):
            found = self._overlapping(form)
        elif isinstance(form, LinkSpeed | GroupOn):
            found = self._on_links(what_if)
        elif isinstance(form, LinksShared):
            found = self._shared()
        elif isinstance(form, ComputeShared):
            found, unit = self._beside(), "computations"
        elif isinstance(form, RecomputeOff):
            found, unit = self._recomputed(), "kernels and communications"
        elif isinstance(form, HostFactor):
            found, unit = self._issued(), "launches"
        else:
            found, unit = self._kernels(form), self._unit
        if found.is_nothing:
            raise UsageError(f"what-if {what_if.text!r} touches nothing: {self._why(what_if)}")
        return self._effect(what_if.text, found, unit)

    def _effect(self, text: str, found: _Found, unit: str) -> Effect:
        classes = self.graph.classes
        most = max(found.names, key=lambda names: names.total())
        named = [f"{name} {count:,}" for name, count in most.most_common(MOST_NAMED)]
        left = len(most) - len(named)
        more = f" and {left} more" if left > 0 else ""
        pairs = list(zip(classes, found.names, strict=True))
        ranks = sum(c.size for c, names in pairs if names.total())
        world = self.graph.world_size
        where = "" if ranks == world else f" on {ranks:,} of {world:,} ranks"
        spent = sum(c.size * ns for c, ns in zip(classes, found.ns, strict=True))
        return Effect(
            text=text,
            touches=f"{', '.join(named)}{more} {unit} a step{where}",
            count=most.total(),
            share=spent / (world * self.step_ns) if self.step_ns else 0.0,
        )

    def _overlapping(self, form: OverlapOff) -> _Found:
        known = {
            id(c.trace): blocking(c.trace, meant_nodes(c.trace, form.group))[1]
            for c in self.graph.classes
        }
        found = _Found()
        for rank_class in self.graph.classes:
            found.add(*self._communication(rank_class, known[id(rank_class.trace)]))
        return found

    def _on_links(self, what_if: WhatIf) -> _Found:
        """Find communications whose time the what-if changes."""
        scenario = replace(self.alteration.scenario, what_ifs=(what_if.text,))
        alone = scenario.durations(self.graph)
        found = _Found()
        for c in self.graph.classes:
            pairs = zip(self._modelled.body(c.index, 0), alone.body(c.index, 0), strict=True)
            differs_N = np.zeros(c.trace.n_nodes, dtype=bool)
            differs_N[c.trace.n_prologue :] = [np.any(was != then) for was, then in pairs]
            found.add(*self._communication(c, differs_N & c.trace.communicates_N))
        return found

    def _shared(self) -> _Found:
        """Find communications that take longer because they share links with others."""
        found = _Found()
        for c in self.graph.classes:
            longer_N = np.zeros(c.trace.n_nodes, dtype=bool)
            extra_B = self.shared_ns.get(c.index)
            if extra_B is not None:
                longer_N[c.trace.n_prologue :] = extra_B > 0
            found.add(*self._communication(c, longer_N))
        return found

    def _beside(self) -> _Found:
        """Find computation that takes longer because communications run beside it."""
        found = _Found()
        for c in self.graph.classes:
            trace = c.trace
            longer_B = self.beside_ns.get(c.index, np.zeros(trace.n_body, dtype=np.int64)) > 0
            names = trace.label_N[trace.n_prologue :][longer_B].tolist()
            labels = Counter(trace.labels[name] for name in names)
            found.add(labels, self._spent_ns(c, longer_B))
        return found

    def _communication(
        self, rank_class: RankClass, touched_N: NDArray[np.bool_]
    ) -> tuple[Counter[str], float]:
        """Count the touched communications of a class by group, and add up their time."""
        trace = rank_class.trace
        touched_B = touched_N[trace.n_prologue :]
        indices = trace.group_index_N[trace.n_prologue :][touched_B].tolist()
        return Counter(trace.group_label(i) for i in indices), self._spent_ns(rank_class, touched_B)

    def _spent_ns(self, rank_class: RankClass, touched_B: NDArray[np.bool_]) -> float:
        body = self.durations.body(rank_class.index, 0)
        return sum(float(np.mean(body[b])) for b in np.flatnonzero(touched_B).tolist())

    def _kernels(self, change: KernelChange) -> _Found:
        found = _Found()
        if self._is_measured:
            pattern = change.pattern if isinstance(change, KernelFactor) else ""
            for c in self.graph.classes:
                touched_B = labelled_nodes(c.trace, pattern)[c.trace.n_prologue :]
                names = c.trace.label_N[c.trace.n_prologue :][touched_B].tolist()
                labels = Counter(c.trace.labels[name] for name in names)
                found.add(labels, self._spent_ns(c, touched_B))
            return found
        for c in self.graph.classes:
            names, spent = self._launched[id(c.trace)].touched(change)
            found.add(names, spent)
        return found

    def _issued(self) -> _Found:
        found = _Found()
        for c in self.graph.classes:
            found.add(*self._launched[id(c.trace)].issued())
        return found

    def _recomputed(self) -> _Found:
        found = _Found()
        for c in self.graph.classes:
            if self._is_measured:
                found.add(Counter(), 0.0)
                continue
            launched = self._launched[id(c.trace)]
            names, kernels_ns = launched.recomputed()
            again, again_ns = self._communication(c, recomputed_nodes(c.trace, launched.log))
            found.add(names + again, kernels_ns + again_ns)
        return found

    @cached_property
    def _modelled(self) -> DurationSource:
        return self.alteration.scenario.durations(self.graph)

    @property
    def _is_measured(self) -> bool:
        return self.alteration.scenario.kernel_costs is None

    @property
    def _unit(self) -> str:
        return "computations" if self._is_measured else "kernels"

    @cached_property
    def _launched(self) -> dict[int, Launched]:
        """Launches of a rank of each class, by the id of the class's trace."""
        recosting = self.alteration.recosting
        traces = {id(c.trace): c.trace for c in self.graph.classes}
        return {
            key: Launched(log=next(iter(recosting.logs(trace))), model=recosting.model)
            for key, trace in traces.items()
        }

    def _why(self, what_if: WhatIf) -> str:
        """Say why the what-if touches nothing: what there is in the job."""
        form = what_if.form
        if isinstance(form, OverlapOff | GroupOn):
            return self._why_not_group(form)
        if isinstance(form, LinkSpeed):
            return f"no communication that is modelled takes another time. {self._links()}"
        if isinstance(form, LinksShared):
            return (
                "no two modelled communications of different groups are on one link at the same "
                f"time. {self._links()}"
            )
        if isinstance(form, ComputeShared):
            return "no kernels run while a communication of their rank is in progress"
        if isinstance(form, RecomputeOff):
            return (
                "the captures tell of nothing that a backward pass computes a second time; those "
                "of an earlier version do not tell (run the program again with --fresh)"
            )
        if self._is_measured:
            return f"computation was measured; it is called {_listed(self._labels())}"
        kinds, operators = Counter[str](), Counter[str]()
        for launched in self._launched.values():
            kinds += launched.kinds
            operators += launched.operators
        return (
            f"there are kernels of the kinds {_listed(_by_count(kinds))}, of the operators "
            f"{_listed(_by_count(operators))}"
        )

    def _labels(self) -> list[str]:
        """List the labels of computation in a step."""
        found: set[str] = set()
        for trace in (c.trace for c in self.graph.classes):
            used = np.unique(trace.label_N[trace.n_prologue :][trace.computes_B]).tolist()
            found |= {trace.labels[n] for n in used}
        return sorted(found)

    def _why_not_group(self, form: OverlapOff | GroupOn) -> str:
        meant = any(meant_nodes(c.trace, form.group).any() for c in self.graph.classes)
        if not meant:
            labels = group_labels(self.graph)
            there = f"there are {_listed(labels)}" if labels else "no group does"
            return f"no group of that name communicates in a step; {there}"
        if isinstance(form, OverlapOff):
            return "its communications block computation already"
        return (
            "its communications take the same time there: they go that way already, or were "
            f"measured. {self._links()}"
        )

    def _links(self) -> str:
        """Say which groups use which link."""
        cluster = self.alteration.scenario.cluster
        told = []
        for name in ("nvlink", "network"):
            form = LinkSpeed(link=LINKS[name], factor=0.5)
            used = self._on_links(WhatIf(text=f"link={name} x0.5", form=form))
            labels = sorted(set().union(*used.names))
            rate = getattr(cluster, LINKS[name]).bandwidth_bytes_per_s / 1e9
            groups = _listed(labels) or "no group"
            told.append(f"{name} ({LINKS[name]}, {rate:,.1f} GB/s): {groups}")
        return "Modelled communications by link: " + "; ".join(told)


def _by_count(names: Counter[str]) -> list[str]:
    return [name for name, _ in names.most_common()]


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - MOST_LISTED} more" if len(known) > MOST_LISTED else ""
    return ", ".join(known[:MOST_LISTED]) + more
