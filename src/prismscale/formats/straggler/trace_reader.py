"""Reads the operation table of a ByteDance straggler trace, and leaves out what cannot be used.

The format is that of the artifact of "Understanding Stragglers in Large Model Training Using
What-if Analysis" (arXiv 2505.05713): a Parquet file with one row for each operation of each worker
(a cell of the data × pipeline parallel grid) in each step: ``dp_rank, stage, step, optype,
start_ts, duration`` (seconds), ``seq_id`` (number of the operation among those of its type) and
``mb_id`` (microbatch of a computation).

Rows are read in batches, and 44 bytes per row are kept. If there are more than ``max_rows`` rows,
only as many steps are kept as fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.formats.straggler.table import OpKey, OpTable, Repairs, StageTable

ROW = np.dtype(
    [
        ("dp_rank", "i4"),
        ("stage", "i4"),
        ("step", "i8"),
        ("op", "i4"),
        ("seq_id", "i4"),
        ("mb_id", "i4"),
        ("start_ts", "f8"),
        ("duration", "f8"),
    ]
)
IDENTITY = ("step", "stage", "dp_rank", "op", "seq_id")
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mb_id")
BATCH_ROWS = 1 << 17
MAX_ROWS = 50_000_000
"""Rows kept in memory at once: 2.2 GB."""
LONGEST_S = 1e6
"""A time in a step beyond this is a defect, and float64 seconds no longer resolve nanoseconds."""
ROUNDING_S = 1e-5
"""Negative durations up to this size are rounding of single-precision clocks: taken as 0."""
Rows = NDArray[Any]


def read_table(
    path: Path,
    repairs: Repairs,
    *,
    shape: tuple[int, int] | None = None,
    max_rows: int = MAX_ROWS,
) -> OpTable:
    """Read a trace.

    Args:
        path: the Parquet file.
        repairs: collects everything that was repaired or left out.
        shape: expected data-parallel and pipeline sizes; None takes what is there.
        max_rows: keep no more rows than this (but at least one step).

    Raises:
        FormatError: the file is not Parquet, columns are missing, a worker is in no step, or no
            step is left after those with missing, doubled or impossible values are taken out.
    """
    labels: dict[str, int] = {}
    rows = _load(path, _chosen_steps(path, max_rows, repairs), labels)
    rows = _without_repetitions(rows, repairs)
    n_dp, n_stages = shape or (int(rows["dp_rank"].max()) + 1, int(rows["stage"].max()) + 1)
    _require_workers(path, rows, n_dp, n_stages)
    repairs.skip(rows["step"][~_plausible(rows)], "a start or duration is negative or no number")
    _skip_ambiguous(rows, repairs)
    codes = [_stage_codes(rows, stage, n_dp) for stage in range(n_stages)]
    _skip_incomplete(rows, codes, n_dp, repairs)
    skipped = list(repairs.skipped_steps)
    rows = rows[~np.isin(rows["step"], skipped)]
    if len(rows) == 0:
        reasons = "; ".join(repairs.sentences()[:4])
        raise FormatError(f"{path}: no usable step is left ({reasons})")
    names = tuple(labels)
    return OpTable(
        step_ids=tuple(np.unique(rows["step"]).tolist()),
        n_replicas=n_dp,
        stages=tuple(_stage_table(rows, s, codes[s], n_dp, names) for s in range(n_stages)),
    )


def _batches(path: Path, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path) as file:
            missing = [c for c in columns if c not in file.schema_arrow.names]
            if missing:
                raise FormatError(
                    f"{path}: no column {', '.join(missing)}; a straggler trace has "
                    f"{', '.join(COLUMNS)}"
                )
            yield from file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{path}: not a readable Parquet file ({error})") from error


def _column(path: Path, batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    """Return the numbers of a column. A missing real is NaN; a missing integer is an error."""
    column = batch.column(name)
    if name in ("start_ts", "duration"):
        return np.asarray(pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False))
    if column.null_count:
        raise FormatError(f"{path}: {column.null_count} rows without {name}")
    values = np.asarray(pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False))
    floor = -1 if name == "mb_id" else 0
    if len(values) and (values.min() < floor or (name != "step" and values.max() >= 2**31)):
        raise FormatError(f"{path}: {name} out of range ({values.min()} … {values.max()})")
    return values


def _chosen_steps(path: Path, max_rows: int, repairs: Repairs) -> NDArray[np.int64]:
    counts: dict[int, int] = {}
    for batch in _batches(path, ("step",)):
        steps, n = np.unique(_column(path, batch, "step"), return_counts=True)
        for step, count in zip(steps.tolist(), n.tolist(), strict=True):
            counts[step] = counts.get(step, 0) + count
    if not counts:
        raise FormatError(f"{path}: the trace has no rows")
    every = np.array(sorted(counts), dtype=np.int64)
    fit = max(1, int(len(every) * max_rows / max(sum(counts.values()), max_rows)))
    # Evenly spread, because neighbouring steps resemble each other.
    chosen = every[np.unique(np.linspace(0, len(every) - 1, fit).round().astype(np.int64))]
    repairs.skip(np.setdiff1d(every, chosen), f"only {max_rows:,} rows are kept in memory")
    return chosen


def _load(path: Path, steps: NDArray[np.int64], labels: dict[str, int]) -> Rows:
    parts: list[Rows] = []
    for batch in _batches(path, COLUMNS):
        wanted = np.isin(_column(path, batch, "step"), steps)
        rows = np.empty(batch.num_rows, dtype=ROW)
        names = batch.column("optype").cast(pa.string()).to_pylist()
        if None in names:
            raise FormatError(f"{path}: a row has no optype")
        rows["op"] = [labels.setdefault(n, len(labels)) for n in names]
        for name in COLUMNS:
            if name != "optype":
                rows[name] = _column(path, batch, name)
        parts.append(rows[wanted])
    return np.concatenate(parts)


def _without_repetitions(rows: Rows, repairs: Repairs) -> Rows:
    unique = np.unique(rows)
    repairs.duplicate_rows = len(rows) - len(unique)
    return unique[np.lexsort([unique[name] for name in reversed(IDENTITY)])]


def _require_workers(path: Path, rows: Rows, n_dp: int, n_stages: int) -> None:
    # The file's number of workers may be damaged: do not allocate a table of that size unchecked.
    if n_dp * n_stages > len(rows):
        raise FormatError(
            f"{path}: {len(rows):,} rows for {n_dp:,} × {n_stages:,} workers; every worker has some"
        )
    present = np.zeros((n_dp, n_stages), dtype=bool)
    inside = (rows["dp_rank"] < n_dp) & (rows["stage"] < n_stages)
    if not inside.all():
        raise FormatError(
            f"{path}: workers outside the {n_dp} × {n_stages} data × pipeline grid of the metadata"
        )
    present[rows["dp_rank"], rows["stage"]] = True
    absent = np.argwhere(~present)
    if len(absent):
        named = ", ".join(f"(dp {d}, stage {s})" for d, s in absent[:8].tolist())
        raise FormatError(
            f"{path}: {len(absent)} of {n_dp * n_stages} workers are not in the trace: {named}; "
            "every worker is needed, because waiting can only be told apart from communication "
            "when all members are seen"
        )


def _plausible(rows: Rows) -> NDArray[np.bool_]:
    start, duration = rows["start_ts"], rows["duration"]
    plausible = np.isfinite(start) & (start >= 0) & (start < LONGEST_S)
    plausible &= np.isfinite(duration) & (duration >= -ROUNDING_S) & (duration < LONGEST_S)
    return np.asarray(plausible, dtype=np.bool_)


def _skip_ambiguous(rows: Rows, repairs: Repairs) -> None:
    same = np.ones(len(rows) - 1, dtype=bool)
    for name in IDENTITY:
        same &= rows[name][1:] == rows[name][:-1]
    repairs.skip(rows["step"][1:][same], "an operation is recorded twice with different times")


def _codes(rows: Rows) -> NDArray[np.int64]:
    return np.asarray((rows["op"].astype(np.int64) << 32) | rows["seq_id"], dtype=np.int64)


def _stage_codes(rows: Rows, stage: int, n_dp: int) -> NDArray[np.int64]:
    """Return the operations of a stage: those in more than half of its (worker, step) pairs."""
    own = rows[rows["stage"] == stage]
    codes, counts = np.unique(_codes(own), return_counts=True)
    samples = n_dp * len(np.unique(own["step"]))
    return codes[counts * 2 > samples]


def _skip_incomplete(
    rows: Rows, codes: list[NDArray[np.int64]], n_dp: int, repairs: Repairs
) -> None:
    expected = n_dp * sum(len(c) for c in codes)
    regular = np.zeros(len(rows), dtype=bool)
    for stage, own in enumerate(codes):
        regular |= (rows["stage"] == stage) & np.isin(_codes(rows), own)
    repairs.skip(rows["step"][~regular], "an operation that other steps do not have")
    steps, counts = np.unique(rows["step"], return_counts=True)
    repairs.skip(steps[counts != expected], "operations or workers are missing")


def _stage_table(
    rows: Rows, stage: int, codes: NDArray[np.int64], n_dp: int, names: tuple[str, ...]
) -> StageTable:
    # Rows are complete and sorted by step, worker and operation, so they fill the array in order.
    own = rows[rows["stage"] == stage]
    shape = (-1, n_dp, len(codes))
    start_s = own["start_ts"].reshape(shape)
    end_s = start_s + np.maximum(own["duration"], 0).reshape(shape)
    return StageTable(
        stage=stage,
        keys=tuple(OpKey(label=names[c >> 32], sequence=c & 0xFFFFFFFF) for c in codes.tolist()),
        microbatch_K=own["mb_id"][: len(codes)].astype(np.int32),
        start_ns_TDK=np.rint(start_s * 1e9).astype(np.int64),
        end_ns_TDK=np.rint(end_s * 1e9).astype(np.int64),
    )
