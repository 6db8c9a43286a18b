"""Writes ranks of a re-timed job as Chakra execution traces, one file a rank, with start times.

Each file, ``<prefix>.<rank>.et``, holds the last simulated step. Beside them lies
``comm_group.json`` (group name → ranks), as ASTRA-sim reads it. Chakra counts microseconds; the
attributes ``start_time_ns`` and ``duration_ns`` keep what that rounding loses. Further facts let a
job be read back as it was: ``earlier_step_distances`` holds edges that cross the step's border (in
nodes back), ``whole_bytes`` holds our size where ``comm_size`` is the input of one member, and the
metadata lists the groups of the rank by group index.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import UsageError
from prismscale.files import atomic_write
from prismscale.formats.chakra.exported_class import ExportedClass, GroupUse
from prismscale.formats.chakra.protobuf import (
    SCHEMA_VERSION,
    GlobalMetadata,
    attribute,
    write_message,
)
from prismscale.graph.channels import ChannelKey, ClassChannels, classes_of
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import NodeKind
from prismscale.sim.timeline import RankTimeline, Timeline

GROUPS_FILE = "comm_group.json"
"""Name of the file beside the traces that maps group names to ranks."""

Use = tuple[ChannelKey, int]
"""(channel, n): the n-th use of a channel within a step, counted from 0."""


def write_chakra(
    graph: JobGraph,
    timeline: Timeline,
    durations: DurationSource,
    folder: Path,
    *,
    prefix: str = "trace",
) -> list[Path]:
    """Write every rank whose nodes the timeline holds (``simulate(…, ranks=…)``).

    Args:
        graph: the job.
        timeline: the re-timed job; its last step is written.
        durations: the durations it was re-timed with.
        folder: where to write; created if it is missing.
        prefix: start of the file names.

    Raises:
        UsageError: the timeline holds no rank's nodes.
        StorageError: a file cannot be written.
    """
    if not timeline.ranks:
        raise UsageError("the timeline holds no rank's nodes; simulate with ranks=…")
    step = timeline.step_end_ns_TDR.shape[0] - 1
    spoken = _spoken(graph, durations, step)
    names = _GroupNames(graph)
    classes: dict[int, _ClassOnRanks] = {}
    groups: dict[str, list[int]] = {}
    paths = []
    for rank, rows in sorted(timeline.ranks.items()):
        index = rows.class_index
        if index not in classes:
            body = durations.body(index, step)
            classes[index] = _ClassOnRanks(graph, graph.classes[index], body, spoken, names)
        found = classes[index]
        own = found.groups_of(rank)
        groups |= {g.name: list(g.ranks) for g in own}
        path = folder / f"{prefix}.{rank}.et"
        with atomic_write(path) as file:
            write_message(file, found.metadata(rank, own))
            file.writelines(found.messages(rank, rows, step, own))
        paths.append(path)
    with atomic_write(folder / GROUPS_FILE) as file:
        file.write(json.dumps(groups).encode())
    return paths


def _spoken(graph: JobGraph, durations: DurationSource, step: int) -> dict[Use, Duration]:
    """Return the duration of every communication, as its speaker's class holds it.

    The speaker is the sender of a message, or the first rank of a collective's group.
    """
    found: dict[Use, Duration] = {}
    for rank_class in graph.classes:
        body = durations.body(rank_class.index, step)
        for node, use in _uses(graph, rank_class).items():
            is_speaker = (
                rank_class.trace.kind_N[node] == NodeKind.SEND
                if use[0].is_p2p
                else classes_of(graph, use[0])[0] == rank_class.index
            )
            if is_speaker:
                found[use] = body[node - rank_class.trace.n_prologue]
    return found


def _uses(graph: JobGraph, rank_class: RankClass) -> dict[int, Use]:
    """Return, by communication node of the body, which use of which channel it is in a step."""
    counts: Counter[ChannelKey] = Counter()
    found: dict[int, Use] = {}
    trace, channels = rank_class.trace, ClassChannels(graph, rank_class)
    for node in trace.communications(trace.n_prologue, trace.n_nodes):
        key = channels.of(node)
        found[node] = (key, counts[key])
        counts[key] += 1
    return found


class _GroupNames:
    """Names groups by number, from 1, because ASTRA-sim reads names as whole numbers above 0."""

    def __init__(self, graph: JobGraph) -> None:
        counts = [family.n_groups for family in graph.families]
        self._first = np.concatenate([[1], 1 + np.cumsum(counts)]).tolist()
        self._graph = graph
        self._known: dict[tuple[int, int], GroupUse] = {}

    def of(self, family: int, column: int) -> GroupUse:
        """Return one group of a family."""
        found = self._known.get((family, column))
        if found is None:
            ranks = self._graph.families[family].ranks_KG[:, column].tolist()
            found = GroupUse(name=str(self._first[family] + column), ranks=tuple(ranks))
            self._known[family, column] = found
        return found


class _ClassOnRanks:
    """One class, with the groups and durations that differ between its members."""

    def __init__(
        self,
        graph: JobGraph,
        rank_class: RankClass,
        body: Sequence[Duration],
        spoken: Mapping[Use, Duration],
        names: _GroupNames,
    ) -> None:
        self._graph, self._class, self._names = graph, rank_class, names
        self._exported = ExportedClass(rank_class=rank_class)
        self._durations = [self._duration(node, body, spoken) for node in range(len(body))]

    def _duration(
        self, node: int, body: Sequence[Duration], spoken: Mapping[Use, Duration]
    ) -> tuple[Duration, int]:
        """Return a body node's duration, and the index of the group by which members differ in it.

        The index is -1 where the duration differs by member instead.
        """
        trace, uses = self._class.trace, self._uses
        i = trace.n_prologue + node
        if i not in uses:
            return body[node], -1
        return spoken[uses[i]], int(trace.group_index_N[i])

    @cached_property
    def _uses(self) -> dict[int, Use]:
        return _uses(self._graph, self._class)

    def groups_of(self, rank: int) -> list[GroupUse]:
        """Return the groups of a rank, by group index."""
        member = int(self._graph.member_of_R[rank])
        return [self._names.of(s.family, int(s.group_M[member])) for s in self._class.slots]

    def metadata(self, rank: int, groups: Sequence[GroupUse]) -> Any:
        """Return the first message of a rank's file."""
        described = [
            {"name": g.name, "desc": record.name, "ranks": list(g.ranks)}
            for g, record in zip(groups, self._class.trace.groups, strict=True)
        ]
        attributes: dict[str, bool | int | str | list[int]] = {
            "rank": rank,
            "world_size": self._graph.world_size,
            "process_groups": json.dumps(described),
        }
        return GlobalMetadata(
            version=SCHEMA_VERSION, attr=[attribute(k, v) for k, v in attributes.items()]
        )

    def messages(
        self, rank: int, rows: RankTimeline, step: int, groups: list[GroupUse]
    ) -> Iterator[bytes]:
        """Yield the nodes of the step as framed messages, in program order."""
        trace, member = self._class.trace, int(self._graph.member_of_R[rank])
        columns = [
            member if g < 0 else int(self._class.slots[g].group_M[member])
            for g in range(-1, len(self._class.slots))
        ]
        duration_ns = [_pick(duration, columns[g + 1]) for duration, g in self._durations]
        first_row = trace.n_prologue + step * trace.n_body - rows.first_position
        return self._exported.messages(rank, rows, first_row, duration_ns, groups)


def _pick(duration: Duration, column: int) -> int:
    """Return the duration of one member or group, from the first draw."""
    if isinstance(duration, int):
        return duration
    values = np.asarray(duration)
    if values.ndim == 0:
        return int(values)
    row = values.reshape(-1, values.shape[-1])[0]
    return int(row[column] if len(row) > 1 else row[0])
