"""Several what-ifs combined into one change of a job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import Cluster
from prismscale.cost.collective import CollectiveModel, RescaledCollectives, collective_model
from prismscale.cost.kernel_changes import HostFactor, KernelChange, KernelFactor, ProductDtype
from prismscale.durations.what_if.blocking import blocking
from prismscale.durations.what_if.forms import (
    ComputeShared,
    Form,
    GroupOn,
    LinkSpeed,
    LinksShared,
    OverlapOff,
    RecomputeOff,
    WhatIf,
    parse_what_ifs,
)
from prismscale.durations.what_if.meant_groups import is_meant, links_of, meant_nodes
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace

F = TypeVar("F", bound=Form)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfs:
    """What-ifs that apply at the same time."""

    each: tuple[WhatIf, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> WhatIfs:
        """Parse what-ifs from their texts.

        Raises:
            UsageError: one is invalid, one is given twice, or two contradict each other.
        """
        return cls(each=parse_what_ifs(texts))

    @property
    def kernels(self) -> tuple[KernelChange, ...]:
        """Changes of kernel costs; element types come first, so that factors apply on top."""
        return (*self._all(ProductDtype), *self._all(KernelFactor), *self._all(HostFactor))

    @property
    def changes_dtypes(self) -> bool:
        """Whether products have another element type than the program's."""
        return bool(self._all(ProductDtype))

    @property
    def recomputes(self) -> bool:
        """Whether backward passes compute again what forward passes did not keep."""
        return not self._all(RecomputeOff)

    @property
    def shares_links(self) -> bool:
        """Whether groups that communicate at the same time share the links."""
        return bool(self._all(LinksShared))

    @property
    def shares_compute(self) -> bool:
        """Whether communications take multiprocessors from what computes beside them."""
        return bool(self._all(ComputeShared))

    @property
    def overlaps(self) -> tuple[OverlapOff, ...]:
        """Groups whose communications block computation."""
        return self._all(OverlapOff)

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return ``cluster`` with its changed links."""
        return reduce(lambda so_far, form: form.on(so_far), self._all(LinkSpeed), cluster)

    def communication(self, cluster: Cluster) -> CollectiveModel:
        """Return the model of communication on ``cluster`` with its changed links."""
        model = collective_model(cluster)
        if cluster.measured is None:
            return collective_model(self.cluster(cluster))
        if not self._all(LinkSpeed):
            return model
        return RescaledCollectives(model, cluster, self.cluster(cluster))

    def links_of(self, graph: JobGraph, cluster: Cluster) -> Mapping[int, NDArray[np.int64]]:
        """See :func:`prismscale.durations.what_if.meant_groups.links_of`."""
        return links_of(self._all(GroupOn), graph, cluster)

    def ordered(self, trace: RankTrace) -> RankTrace:
        """Return ``trace`` with the edges of communications that block its computation."""
        for form in self.overlaps:
            trace, _ = blocking(trace, meant_nodes(trace, form.group))
        return trace

    def blocks(self, label: str) -> bool:
        """Return whether communications of the group with that label block computation."""
        return any(is_meant(form.group, label) for form in self.overlaps)

    def factor_of(self, label: str) -> float:
        """Return the factor on measured computation with that label, a phase or a kernel."""
        factors = (f.factor for f in self._all(KernelFactor) if re.fullmatch(f.pattern, label))
        return math.prod(factors)

    def _all(self, kind: type[F]) -> tuple[F, ...]:
        return tuple(w.form for w in self.each if isinstance(w.form, kind))
