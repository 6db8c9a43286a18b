"""Reads flight records: the files that torch, or :mod:`dump_writer`, left in a folder.

The frames of a real dump reach into torch. The line that is kept is that of the innermost frame
outside torch and the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prismscale.errors import FormatError, UsageError
from prismscale.formats.flight_recorder.plain_pickle import load_plain_pickle
from prismscale.formats.flight_recorder.rank_calls import (
    NO_PEER,
    CallColumns,
    CallShape,
    CallState,
    FlightRecord,
    RankCalls,
    RecordedGroup,
    Sizes,
)
from prismscale.graph.parquet import MAX_WORLD_SIZE
from prismscale.typed_files import read_json

MOST_CALLS = 1_000_000
"""Most calls of one rank."""
MOST_NAME = 400
"""Most characters of a name or path that are kept."""
_RANK = re.compile(r"(.*?)(\d{1,9})(\.json|\.pkl|\.pickle)?")
_RANKS = re.compile(r"\s*\[?[\d,\s]*\]?\s*")
_P2P = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
_NOT_THE_USERS = re.compile(r"(^|/)torch/|<|\?\?|typing_extensions\.py")
_STATES = {state.name.lower(): state for state in CallState}


def load_flight_record(folder: Path, prefix: str | None = None) -> FlightRecord:
    """Return the records of all ranks in ``folder``.

    Args:
        folder: holds a file for each rank, named by a prefix and the rank.
        prefix: the prefix; None takes the one that all files share.

    Raises:
        UsageError: there is no such folder, no such file, or there are files of several prefixes.
        FormatError: a file is damaged, or is no record.
    """
    files = _files(folder, prefix)
    reader = _Reader()
    ranks = {rank: reader.rank(rank, path) for rank, path in sorted(files.items())}
    named = max((r for calls in ranks.values() for g in calls.groups for r in g.ranks), default=0)
    return FlightRecord(
        shapes=tuple(reader.shapes),
        sites=tuple(reader.sites),
        ranks=ranks,
        world_size=max(named, *ranks) + 1,
    )


def _files(folder: Path, prefix: str | None) -> dict[int, Path]:
    try:
        paths = [path for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise UsageError(f"cannot read '{folder}': {error.strerror}") from error
    by_prefix: dict[str, dict[int, Path]] = {}
    for path in paths:
        found = _RANK.fullmatch(path.name)
        if found is not None and not path.name.startswith("."):
            by_prefix.setdefault(found[1], {})[int(found[2])] = path
    chosen = by_prefix if prefix is None else {prefix: by_prefix.get(prefix, {})}
    if not any(chosen.values()):
        raise UsageError(
            f"{folder} holds no flight record: files named by a prefix and the rank, as "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE says"
        )
    if len(chosen) > 1:
        names = ", ".join(sorted(repr(name) for name in chosen)[:8])
        raise UsageError(f"{folder} holds files of several prefixes: give --prefix one of {names}")
    (files,) = chosen.values()
    beyond = [rank for rank in files if rank >= MAX_WORLD_SIZE]
    if beyond:
        raise UsageError(f"{files[beyond[0]]}: a rank is below {MAX_WORLD_SIZE:,}")
    return files


@dataclass(kw_only=True)
class _Reader:
    """Reads one rank after another into common tables."""

    shapes: dict[CallShape, int] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    groups: dict[RecordedGroup, RecordedGroup] = field(default_factory=dict)
    columns: dict[bytes, CallColumns] = field(default_factory=dict)

    def rank(self, rank: int, path: Path) -> RankCalls:
        """Return the record of a rank, read from its file."""
        dump = read_json(path) if path.suffix == ".json" else load_plain_pickle(path)
        try:
            return self._read(rank, dump)
        except (
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise FormatError(f"{path}: no flight record of version 2 ({what})") from error

    def _read(self, rank: int, dump: Mapping[str, Any]) -> RankCalls:
        if not str(dump["version"]).startswith("2."):
            raise ValueError(f"version {str(dump['version'])[:20]}")
        groups: list[RecordedGroup] = []
        index_of: dict[str, int] = {}
        for name, config in dump["pg_config"].items():
            index_of[str(name)] = len(groups)
            groups.append(self._group(str(name), config))
        entries = dump["entries"]
        if not isinstance(entries, list | tuple) or len(entries) > MOST_CALLS:
            raise ValueError("its entries are no list, or too many")
        rows = [
            self._row(entry, rank, groups, index_of)
            for entry in entries
            if entry["profiling_name"].partition(":")[2] != "coalesced"
        ]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 6)
        columns = CallColumns(
            group_N=table[:, 0].astype(np.int32),
            shape_N=table[:, 1].astype(np.int32),
            peer_N=table[:, 2].astype(np.int32),
            seq_N=table[:, 3],
            state_N=table[:, 4].astype(np.int8),
            site_N=table[:, 5].astype(np.int32),
        )
        return RankCalls(
            rank=rank,
            groups=tuple(groups),
            columns=self.columns.setdefault(columns.digest(), columns),
            is_whole=not entries or entries[0]["record_id"] == 0,
        )

    def _group(self, name: str, config: Mapping[str, Any]) -> RecordedGroup:
        ranks = config["ranks"]
        if isinstance(ranks, str):
            if _RANKS.fullmatch(ranks) is None:
                raise ValueError("the ranks of a group are no list of numbers")
            ranks = [int(rank) for rank in ranks.strip(" []").split(",") if rank.strip()]
        if any(not 0 <= rank < MAX_WORLD_SIZE for rank in ranks):
            raise ValueError("a group with impossible ranks")
        description = str(config["desc"])[:MOST_NAME]
        group = RecordedGroup(
            name=name[:MOST_NAME],
            description="" if description == "undefined" else description,
            ranks=tuple(map(int, ranks)),
        )
        return self.groups.setdefault(group, group)

    def _row(
        self,
        entry: Mapping[str, Any],
        rank: int,
        groups: list[RecordedGroup],
        index_of: dict[str, int],
    ) -> tuple[int, int, int, int, int, int]:
        group = index_of[str(entry["process_group"][0])]
        name = entry["profiling_name"].partition(":")[2]
        message = _P2P.fullmatch(name)
        peer = NO_PEER
        if message is not None:
            name = message[1]
            members = groups[group].ranks
            peer = (int(message[4]) - members.index(rank)) % len(members)
        shape = CallShape(
            op=str(name)[:MOST_NAME],
            input_sizes=_sizes(entry["input_sizes"]),
            output_sizes=_sizes(entry["output_sizes"]),
            dtypes=tuple(str(dtype)[:40] for dtype in entry.get("input_dtypes", ())),
        )
        if shape.is_p2p and message is None:
            raise ValueError("a send or receive that names no peer")
        is_p2p = bool(entry.get("is_p2p", message is not None))
        seq = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
        return (
            group,
            self.shapes.setdefault(shape, len(self.shapes)),
            peer,
            int(seq),
            _STATES[entry["state"]],
            self._site(entry.get("frames") or ()),
        )

    def _site(self, frames: Any) -> int:
        for frame in frames:
            filename = str(frame["filename"])[-MOST_NAME:]
            if _NOT_THE_USERS.search(filename) is None:
                return self.sites.setdefault(f"{filename}:{frame['line']}", len(self.sites))
        return -1


def _sizes(given: Any) -> Sizes:
    return tuple(tuple(map(int, size)) for size in given)
