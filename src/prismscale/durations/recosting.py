"""Recomputes the durations of a null run for other kernel costs, without a new capture.

Each captured rank left a log of its launches beside its trace. The durations of a class are derived
from the logs of its captured members in the same way as from their traces: each node takes the
longest duration over these members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import Device
from prismscale.cost.kernel import KernelModel
from prismscale.cost.kernel_changes import KernelChange
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.cost.launch_log import LaunchLog, costs, load_launch_log, recost
from prismscale.errors import UsageError
from prismscale.graph.io import load_trace
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import NO_GROUP, RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSettings:
    """Source of a null run's kernel costs, apart from the target GPU."""

    kernels: str = ""
    """File of measured kernel times that replace the model's; empty for none."""
    fused: bool = False
    """Whether elementwise work costs what it does when torch.compile fuses it."""

    def model(self, device: Device, changes: tuple[KernelChange, ...] = ()) -> KernelModel:
        """Return the kernel model of ``device``, with the what-ifs ``changes`` on top.

        Raises:
            UsageError: the GPU or the file is not known.
        """
        source = KernelCostSource(table=self.kernels, fused=self.fused, changes=changes)
        return source.model(device)


def launches_path(captures: Path, rank: int) -> Path:
    """Return the path of a captured rank's launch log."""
    return captures / f"launches-{rank}.parquet"


def trace_path(captures: Path, rank: int) -> Path:
    """Return the path of a captured rank's trace."""
    return captures / f"rank-{rank}.parquet"


@dataclass(frozen=True, kw_only=True)
class Recosting:
    """Costs the computation of traces again, at other kernel costs.

    Stored durations are compared with recomputed ones, so both must come from the same version of
    the kernel costs. A rank is refused if today's costs do not reproduce its stored durations.
    """

    captures: Path
    """Folder of the traces and of the logs beside them."""
    model: KernelModel
    stored_model: KernelModel
    """Kernel model that gave the stored traces their computation."""
    recomputes: bool = True
    """False removes what a backward pass computes a second time, communications included."""

    def trace(self, trace: RankTrace) -> RankTrace:
        """Return ``trace`` with its computation at the costs of :attr:`model`.

        Raises:
            UsageError: a log is missing, or belongs to another trace.
            FormatError: a file is damaged.
        """
        rows, logs = [], list(self.logs(trace))
        for log in logs:
            durations = recost(log, *costs(log, self.model), recomputes=self.recomputes)
            rows.append(_body_ns(log, trace, durations))
        longest_B = np.max(rows, axis=0)
        costed = replace(trace, body_ns_SB=longest_B[np.newaxis])
        return costed if self.recomputes else _without(costed, recomputed_nodes(costed, logs[0]))

    def logs(self, trace: RankTrace) -> Iterator[LaunchLog]:
        """Yield the logs of the captured ranks from which a class has its durations.

        Raises:
            UsageError: a log is missing.
            FormatError: a file is damaged.
        """
        for rank in dict.fromkeys(trace.facts.longest_of or (trace.captured_as,)):
            if rank not in self._known:
                self._known[rank] = self._load(rank)
            yield self._known[rank]

    @cached_property
    def _known(self) -> dict[int, LaunchLog]:
        return {}

    def _load(self, rank: int) -> LaunchLog:
        path = launches_path(self.captures, rank)
        if not path.is_file():
            raise UsageError(
                f"{path} is missing, without which other costs need another capture: run the "
                "program again with what is to change"
            )
        log = load_launch_log(path)
        self._refuse_other_prices(log, load_trace(trace_path(self.captures, rank)))
        return log

    def _refuse_other_prices(self, log: LaunchLog, stored: RankTrace) -> None:
        """Raise if :attr:`stored_model` does not reproduce the stored durations.

        Kernel costs change between versions of this program, and so may a file of measured kernels.
        """
        durations_ns_N = recost(log, *costs(log, self.stored_model))
        stored_ns, today_ns = stored.body_ns_SB[0], _body_ns(log, stored, durations_ns_N)
        if np.array_equal(stored_ns, today_ns):
            return
        share = today_ns[log.node_N].sum() / max(stored_ns[log.node_N].sum(), 1) - 1
        raise UsageError(
            f"rank {stored.rank} was captured with other prices of kernels: by today's, its "
            f"computation takes {share:+.2%}, so the two cannot be compared. Run the program again "
            "with --fresh"
        )


def recomputed_nodes(trace: RankTrace, log: LaunchLog) -> NDArray[np.bool_]:
    """Return which nodes (N) are communications that a backward pass makes a second time."""
    is_recomputed_N = np.zeros(trace.n_nodes, dtype=bool)
    for part in log.recomputed:
        first, stop = trace.n_prologue + part.first_node, trace.n_prologue + part.stop_node
        is_recomputed_N[first:stop] = True
    return is_recomputed_N & trace.communicates_N


def _without(trace: RankTrace, leaving_N: NDArray[np.bool_]) -> RankTrace:
    """Return ``trace`` without some of its communications.

    Their nodes stay, as computation that takes no time, so that nodes keep their numbers.
    """
    if not leaving_N.any():
        return trace
    values = {"kind": NodeKind.COMPUTE, "op": 0, "group_index": NO_GROUP, "peer": -1, "bytes": 0}
    columns = {}
    for name, value in values.items():
        columns[f"{name}_N"] = getattr(trace, f"{name}_N").copy()
        columns[f"{name}_N"][leaving_N] = value
    return replace(trace, **columns)


def _body_ns(
    log: LaunchLog, trace: RankTrace, durations_ns_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return durations of the body; the log numbers nodes from the body's beginning."""
    if len(log.node_N) and int(log.node_N[-1]) >= trace.n_body:
        raise UsageError(
            f"rank {trace.rank}: the log of launches is of another trace; run the program again "
            "with --fresh"
        )
    body_ns_B = trace.body_ns_SB[0].copy()
    body_ns_B[log.node_N] = durations_ns_N
    return body_ns_B
