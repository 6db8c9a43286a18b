"""The scenario of a run: the cluster, compute speed, faults and what-ifs for timing its graph.

A run keeps its scenario beside its graph, and every command reads the two together, so a change
made after the capture is stated once. Each part may be changed again when a run is read, without a
new capture, as long as the sequence of communications stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prismscale.cluster import Cluster
from prismscale.cost.kernel import KernelModel
from prismscale.cost.kernel_changes import KernelChange
from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.recosting import CostSettings
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.errors import FormatError, UsageError
from prismscale.files import write_json
from prismscale.graph.job_graph import JobGraph
from prismscale.typed_files import decode

SCHEMA = "prismscale.scenario/1"
RECORDED, NONE = WITHOUT_PROFILE = ("recorded", "none")
"""Values of ``--variability`` other than a profile: as recorded, or none at all."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that a graph's durations depend on besides the graph."""

    cluster: Cluster
    compute_scale: float = 1.0
    """Factor on all computation."""
    faults: Faults = field(default_factory=Faults)
    kernel_costs: CostSettings | None = None
    """Source of the computation's costs on a null device; None where computation was measured."""
    captures: str = ""
    """Folder, in the run folder, of the traces from which the graph was made."""
    what_ifs: tuple[str, ...] = ()
    """See :mod:`prismscale.durations.what_if.forms`."""
    variability: VariabilityProfile | None = None
    """Variability of durations that a model answered. None: forecasts vary them by a constant, or
    not at all."""

    def __post_init__(self) -> None:
        check_compute_scale(self.compute_scale)
        # Parsed here, so that a meaningless what-if is refused before anything runs.
        WhatIfs.parse(self.what_ifs)

    @property
    def hoped(self) -> WhatIfs:
        """The what-ifs, parsed."""
        return WhatIfs.parse(self.what_ifs)

    def kernel_model(self, changes: tuple[KernelChange, ...] = ()) -> KernelModel:
        """Return the kernel model of a null run, with the what-ifs ``changes`` on top.

        Raises:
            UsageError: the computation was measured, or the GPU or a file is not known.
        """
        if self.kernel_costs is None:
            raise UsageError("the computation of this run was measured: it has no log of kernels")
        return self.kernel_costs.model(self.cluster.device, changes)

    def costs_kernels_as(self, other: Scenario) -> bool:
        """Return whether kernels cost the same in both scenarios, what-ifs aside."""
        if self.kernel_costs is None and other.kernel_costs is None:
            return True  # They were measured.
        return (self.kernel_costs, self.cluster.device) == (
            other.kernel_costs,
            other.cluster.device,
        )

    def durations(self, graph: JobGraph, *, counted: bool | None = None) -> GraphDurations:
        """Return the durations of ``graph`` in this scenario.

        Steps take the captured steps' durations in turn. In a job that hangs, steps are counted
        instead, and each takes the median of the captured ones.

        Args:
            graph: the run's graph, as :mod:`prismscale.durations.altered` changes it.
            counted: whether steps are counted; None: only where the job hangs.

        Raises:
            UsageError: a slow or hung rank is not in the job.
        """
        hoped = self.hoped
        is_counted = bool(self.faults.hang) if counted is None else counted
        return GraphDurations(
            graph=graph,
            model=hoped.communication(self.cluster),
            faults=self.faults,
            sampled=not is_counted,
            compute_scale=self.compute_scale,
            links_of=hoped.links_of(graph, self.cluster),
        )

    def changed(
        self,
        *,
        cluster: str | None = None,
        compute_scale: float | None = None,
        slow: Mapping[int, float] | None = None,
        kernels: str | None = None,
        what_ifs: Sequence[str] | None = None,
        variability: str | None = None,
    ) -> Scenario:
        """Return this scenario with the given parts replaced.

        Raises:
            UsageError: a value is invalid, or kernel times or a variability profile are given for a
                run whose kernels were not modelled.
            FormatError: the variability profile is damaged.
        """
        found = self
        if variability is not None:
            found = replace(found, variability=self._profile(variability))
        if cluster is not None:
            found = found._on(Cluster.load(cluster))
        if kernels is not None:
            if found.kernel_costs is None:
                raise UsageError(
                    "--kernels models a null device's kernels; the computation of this run was "
                    "measured"
                )
            found = replace(found, kernel_costs=replace(found.kernel_costs, kernels=kernels))
        if compute_scale is not None:
            found = replace(found, compute_scale=compute_scale)
        if slow is not None:
            found = replace(found, faults=replace(found.faults, slow=dict(slow)))
        if what_ifs is not None:
            found = replace(found, what_ifs=tuple(what_ifs))
        return found

    def _profile(self, given: str) -> VariabilityProfile | None:
        if given in WITHOUT_PROFILE:
            return None
        profile = VariabilityProfile.load(given)
        if self.kernel_costs is None:
            raise UsageError(
                f"--variability {given} varies kernels that a model answered; the computation of "
                f"this run was measured: allowed are {', '.join(WITHOUT_PROFILE)}"
            )
        return profile

    def _on(self, cluster: Cluster) -> Scenario:
        if cluster.processor_communicates != self.cluster.processor_communicates:
            raise UsageError(
                f"{cluster.name} and {self.cluster.name} differ in who communicates, the processor "
                f"or the network: run the program again with --cluster {cluster.name}"
            )
        return replace(self, cluster=cluster)

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        table = {
            "schema": SCHEMA,
            "cluster": self.cluster.to_toml(),
            "compute_scale": self.compute_scale,
            "slow": {str(r): f for r, f in self.faults.slow.items()},
            "hang": {str(r): s for r, s in self.faults.hang.items()},
            "kernel_costs": None if self.kernel_costs is None else asdict(self.kernel_costs),
            "captures": self.captures,
            "what_ifs": self.what_ifs,
            "variability": None if self.variability is None else self.variability.to_toml(),
        }
        write_json(path, table)

    @staticmethod
    def load(path: Path) -> Scenario:
        """Read a scenario that :meth:`save` wrote.

        Raises:
            FormatError: the file holds no scenario.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            return _read(table, str(path))
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{path} holds no scenario that this version reads ({error!r}); run the program "
                "again: captures are reused"
            ) from error
        except UsageError as error:
            raise FormatError(f"{path}: {error}") from error


def check_compute_scale(factor: float) -> None:
    """Raise :class:`UsageError` for a factor that no machine has."""
    if not 0 < factor < 1e4:
        raise UsageError(f"--compute-scale is {factor}; allowed: above 0, below 10,000")


def _read(table: Any, origin: str) -> Scenario:
    if table["schema"] != SCHEMA:
        raise FormatError(
            f"{origin}: schema is {table['schema']!r}; this version reads {SCHEMA}. Run the "
            "program again: captures are reused"
        )
    costs = table["kernel_costs"]
    if costs is not None:
        # Earlier versions wrote the name of the cluster's GPU here, too.
        costs = {key: value for key, value in costs.items() if key != "gpu"}
    return Scenario(
        cluster=Cluster.from_toml(table["cluster"], origin=origin),
        compute_scale=float(table["compute_scale"]),
        faults=decode(Faults, {"slow": table["slow"], "hang": table["hang"]}, origin),
        kernel_costs=None if costs is None else decode(CostSettings, costs, origin),
        captures=str(table["captures"]),
        # Files of earlier versions have no what-ifs.
        what_ifs=tuple(map(str, table.get("what_ifs", ()))),
        # Files of versions without variability profiles have no such key.
        variability=_profile(table.get("variability"), origin),
    )


def _profile(text: str | None, origin: str) -> VariabilityProfile | None:
    return None if text is None else VariabilityProfile.from_toml(text, origin=origin)
