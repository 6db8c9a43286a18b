"""The process groups that a what-if names, and the links that their communications use under it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import Cluster
from prismscale.durations.what_if.forms import GroupOn
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace

_MESH = "mesh_"
"""Prefix that torch's DeviceMesh puts before the name of an axis."""


def is_meant(given: str, label: str) -> bool:
    """Return whether ``given`` names the group with that label.

    It may be the label, the label without the mesh's prefix, or a regular expression that matches
    the whole label.
    """
    if given in (label, label.removeprefix(_MESH)):
        return True
    try:
        return re.fullmatch(given, label) is not None
    except re.error:
        return False


def meant_nodes(trace: RankTrace, given: str) -> NDArray[np.bool_]:
    """Return which nodes (N) are communications of a named group that has several ranks."""
    indices = [
        index
        for index, group in enumerate(trace.groups)
        if len(group.ranks) > 1 and is_meant(given, trace.group_label(index))
    ]
    return np.isin(trace.group_index_N, indices) & trace.communicates_N


def group_labels(graph: JobGraph) -> tuple[str, ...]:
    """Return the labels of the groups of several ranks that communicate in a step of the job."""
    found: set[str] = set()
    for trace in {id(c.trace): c.trace for c in graph.classes}.values():
        body = slice(trace.n_prologue, None)
        used = np.unique(trace.group_index_N[body][trace.communicates_N[body]]).tolist()
        found |= {trace.group_label(index) for index in used if len(trace.groups[index].ranks) > 1}
    return tuple(sorted(found))


def links_of(
    placed: Sequence[GroupOn], graph: JobGraph, cluster: Cluster
) -> Mapping[int, NDArray[np.int64]]:
    """Return, by family, the ranks (``[K, 1]``) whose places its groups are taken to have.

    Raises:
        UsageError: a group has more members than NVLink connects devices, or two what-ifs place it.
    """
    found: dict[int, NDArray[np.int64]] = {}
    by: dict[int, GroupOn] = {}
    for form in placed:
        for family in _families(graph, form.group):
            if by.setdefault(family, form) is not form:
                raise UsageError(
                    f"what-ifs for {by[family].group!r} and {form.group!r} both place group "
                    f"{graph.families[family].name!r}; give one of them"
                )
            found[family] = _places(form, graph.families[family].group_size, cluster)
    return found


def _families(graph: JobGraph, given: str) -> list[int]:
    return sorted(
        {
            rank_class.slots[index].family
            for rank_class in graph.classes
            for index, group in enumerate(rank_class.trace.groups)
            if len(group.ranks) > 1 and is_meant(given, rank_class.trace.group_label(index))
        }
    )


def _places(form: GroupOn, size: int, cluster: Cluster) -> NDArray[np.int64]:
    if form.link == "inter_node":
        return np.arange(size)[:, np.newaxis] * cluster.devices_per_domain
    if size > cluster.devices_per_domain:
        raise UsageError(
            f"what-if 'group={form.group} on nvlink': groups of {size} do not fit the "
            f"{cluster.devices_per_domain} GPUs that NVLink connects; give --cluster with more"
        )
    return np.arange(size)[:, np.newaxis]
