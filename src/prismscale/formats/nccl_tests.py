"""Reads the output of ``nccl-tests`` (``all_reduce_perf`` and its sister programs).

The table differs between versions (``root`` and ``redop`` columns come and go, ``#wrong`` was
called ``error``, launchers put a tag before each line), so rows are read from both ends: size,
count and type from the left, one or two blocks of *time, algbw, busbw, wrong* from the right.
Several runs may follow each other in one text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prismscale.cluster import Measured, MeasuredCurve
from prismscale.errors import FormatError
from prismscale.foreign import reading
from prismscale.graph.node import CollectiveOp

_OPS: Mapping[str, CollectiveOp] = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "broadcast": CollectiveOp.BROADCAST,
    "reduce": CollectiveOp.REDUCE,
    "gather": CollectiveOp.GATHER,
    "scatter": CollectiveOp.SCATTER,
    "alltoall": CollectiveOp.ALL_TO_ALL,
    "sendrecv": CollectiveOp.SEND,
}
_PROGRAM = re.compile(r"\b(" + "|".join(_OPS) + r")_perf\b")
_LAUNCHER_TAG = re.compile(r"^\s*(?:\[[\w,.\-]+\](?:<\w+>)?\s*:?|\d+:|[\w.\-]+:)\s+")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)")
_BLOCK = 4
LARGEST = 1e15
"""Upper limit of any figure; as microseconds, it is 30 years."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclTestsRow:
    """One measured message size."""

    op: CollectiveOp
    n_ranks: int
    """0 where the text does not list the ranks."""
    n_nodes: int
    """Distinct hosts among the ranks; 0 where the text does not list them."""
    n_bytes: int
    in_place: bool
    time_us: float
    algbw_gbps: float
    """Gigabytes (1e9) per second."""
    busbw_gbps: float
    n_wrong: int | None
    """Wrong elements; ``None`` where nothing was checked."""


def parse_nccl_tests(text: str, *, op: CollectiveOp | None = None) -> list[NcclTestsRow]:
    """Return the rows in order of appearance, out-of-place before in-place.

    Args:
        text: standard output of one or more runs, with or without surrounding log lines.
        op: the operation, for texts that do not name the program; a name in the text overrides it.

    Raises:
        FormatError: no row was found, or there are rows but nothing says which operation they
            measure.
    """
    with reading("the text", "the output of nccl-tests"):
        return _parsed(text, op)


def _parsed(text: str, op: CollectiveOp | None) -> list[NcclTestsRow]:
    rows: list[NcclTestsRow] = []
    hosts: dict[int, str] = {}
    in_header = False
    for raw in text.splitlines():
        line = raw if raw.lstrip().startswith("#") else _LAUNCHER_TAG.sub("", raw)
        if program := _PROGRAM.search(line):
            op = _OPS[program[1]]
        if rank := _RANK.search(line):
            # A rank list after rows belongs to the next run.
            hosts = hosts if in_header else {}
            in_header = True
            hosts[int(rank[1])] = rank[2]
            continue
        found = _parse_row(line)
        if found is None:
            continue
        in_header = False
        if op is None:
            raise FormatError(
                "nccl-tests output does not name its program (such as all_reduce_perf); "
                "give the operation"
            )
        n_bytes, blocks = found
        for in_place, block in enumerate(blocks):
            rows.append(_row(op, hosts, n_bytes, bool(in_place), block))
    if not rows:
        raise FormatError(
            "no nccl-tests rows found; expected lines such as "
            "'1048576 262144 float sum -1 27.37 38.31 67.04 0'"
        )
    return rows


def measured_from(rows: Iterable[NcclTestsRow], *, machine: str, date: str) -> Measured:
    """Return curves for a cluster file from out-of-place rows; repeated sizes keep the fastest.

    Raises:
        FormatError: a row does not say how many ranks took part.
    """
    times: dict[tuple[CollectiveOp, int, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.in_place or row.n_bytes == 0 or row.time_us <= 0 or row.n_ranks == 1:
            continue
        if row.n_ranks == 0:
            raise FormatError("nccl-tests output does not list its ranks ('#  Rank  0 …')")
        curve = times[row.op, row.n_ranks, row.n_nodes]
        curve[row.n_bytes] = min(row.time_us, curve.get(row.n_bytes, row.time_us))
    curves = tuple(
        MeasuredCurve(
            op=op,
            group_size=n_ranks,
            nodes=n_nodes,
            n_bytes=tuple(sorted(curve)),
            time_ns=tuple(round(curve[b] * 1e3) for b in sorted(curve)),
        )
        for (op, n_ranks, n_nodes), curve in times.items()
    )
    return Measured(machine=machine, date=date, curves=curves)


def _parse_row(line: str) -> tuple[int, list[list[str]]] | None:
    tokens = line.split()
    if len(tokens) < 3 + _BLOCK or not (tokens[0].isdigit() and tokens[1].isdigit()):
        return None
    if not tokens[2][0].isalpha():
        return None
    # To the left of the blocks stand redop and root, either of which may be absent.
    tail = tokens[3:]
    n_blocks = 2 if len(tail) >= 2 * _BLOCK else 1
    block_tokens = tail[len(tail) - n_blocks * _BLOCK :]
    if len(tail) - len(block_tokens) > 2:
        return None
    blocks = [block_tokens[i : i + _BLOCK] for i in range(0, len(block_tokens), _BLOCK)]
    if not all(_is_number(t) for block in blocks for t in block[:3]):
        return None
    return int(tokens[0]), blocks


def _row(
    op: CollectiveOp, hosts: Mapping[int, str], n_bytes: int, in_place: bool, block: list[str]
) -> NcclTestsRow:
    time_us, algbw, busbw = (float(t) for t in block[:3])
    return NcclTestsRow(
        op=op,
        n_ranks=len(hosts),
        n_nodes=len(set(hosts.values())),
        n_bytes=n_bytes,
        in_place=in_place,
        time_us=time_us,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        n_wrong=int(float(block[3])) if _is_number(block[3]) else None,
    )


def _is_number(token: str) -> bool:
    try:
        return 0 <= float(token) < LARGEST
    except ValueError:
        return False
