"""prismscale's Parquet files: columns, and a JSON header in the footer. Readers trust nothing.

The footer carries ``prismscale`` (the header: format, version, and whatever does not fit columns)
and ``prismscale.sha256`` (its digest); pages carry checksums. So a damaged file is always noticed,
and a malicious file is refused before anything large is built from it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from prismscale.errors import FormatError, StorageError, UsageError
from prismscale.files import atomic_write
from prismscale.foreign import memory_limited

VERSION = 3
HEADER_KEY, DIGEST_KEY = b"prismscale", b"prismscale.sha256"
MAX_VALUES = 2**28
"""Most values in one file: far above a job of 65,536 ranks, far below a small machine's memory."""
_BYTES_A_VALUE = 24
"""Memory that reading may take per value: as stored, as decoded, and joined with others."""
MAX_UNFOLDED = 2**23
"""Most numbers that the runs of one header may unfold to."""
MAX_HEADER_BYTES = 2**26
MAX_WORLD_SIZE = 2**20
"""Most ranks of a job."""


def integers(bits: int) -> pa.DataType:
    """Return the type of a list-of-integers column."""
    kind = {32: pa.int32(), 64: pa.int64()}[bits]
    return pa.list_(pa.field("element", kind, nullable=False))


def schema_of(**columns: pa.DataType) -> pa.Schema:
    """Return a schema whose columns have no missing values."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def list_column(rows_start: NDArray[Any], values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Build a list column from row pointers (length rows + 1) and the concatenated values."""
    return pa.ListArray.from_arrays(
        column(rows_start, pa.int32()), column(values, kind.value_type), type=kind
    )


def column(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Build a column of numbers, converted to ``kind``.

    The column uses the array's own memory. ``pa.array`` would import pandas, if it is installed, to
    see whether it was given a Series. That takes half a second, and a signal that arrives meanwhile
    is lost.

    Raises:
        StorageError: ``kind`` cannot hold one of the numbers.
    """
    array = np.ascontiguousarray(values, kind.to_pandas_dtype())
    if array.dtype != values.dtype and not np.array_equal(array, values):
        raise StorageError(f"a column of {kind} does not hold {max(values, key=abs):,}")
    return pa.Array.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


def write_table(path: Path, table: pa.Table, *, kind: str, header: dict[str, Any]) -> None:
    """Write ``table`` with ``header`` as a file of format ``kind``.

    Raises:
        StorageError: the file cannot be written, or the table is larger than readers accept. No
            half-written file is left.
    """
    if table.nbytes > 8 * MAX_VALUES:
        raise StorageError(
            f"{path} was not written: {table.nbytes / 1e9:.1f} GB are more than the "
            f"{8 * MAX_VALUES / 1e9:.1f} GB of one file; keep fewer draws, steps or ranks"
        )
    document = {"format": f"prismscale {kind}", "version": VERSION, **header}
    text = json.dumps(document, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    with atomic_write(path) as file:
        writer = pq.ParquetWriter(
            file, table.schema, compression="zstd", store_schema=False, write_page_checksum=True
        )
        writer.write_table(table)
        # This must come before the close, which writes the footer.
        writer.add_key_value_metadata({HEADER_KEY: text, DIGEST_KEY: digest})
        writer.close()


def read_table(path: Path, schema: pa.Schema, *, kind: str) -> tuple[pa.Table, Header]:
    """Read a file of format ``kind`` whose columns are ``schema``.

    Raises:
        UsageError: the file does not exist or cannot be read.
        FormatError: the file is damaged, cut short, of another format or version, or absurdly
            large.
    """
    try:
        with path.open("rb") as file:
            return _read(path, pq.ParquetFile(file, page_checksum_verification=True), schema, kind)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        first_line = str(error).partition("\n")[0]
        raise FormatError(
            f"{path} is damaged, cut short, or not a prismscale {kind} ({first_line}); "
            "make it again"
        ) from error


def _read(
    path: Path, file: pq.ParquetFile, schema: pa.Schema, kind: str
) -> tuple[pa.Table, Header]:
    footer = file.metadata.metadata or {}
    if HEADER_KEY not in footer:
        raise FormatError(f"{path} is a Parquet file, but prismscale did not write it")
    text = footer[HEADER_KEY]
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"{path} has a header of {len(text):,} bytes; no job needs that much")
    if hashlib.sha256(text).hexdigest().encode() != footer.get(DIGEST_KEY):
        raise FormatError(f"{path} is damaged: its header does not fit its digest; make it again")
    try:
        header = Header(path=path, place="header", content=json.loads(text))
    except RecursionError as error:
        raise FormatError(f"{path} has a header nested without end") from error
    if header.text("format") != f"prismscale {kind}":
        raise FormatError(f"{path} is a {header.text('format')}, not a prismscale {kind}")
    version = header.integer("version", 0, 2**31)
    if version != VERSION:
        raise FormatError(
            f"{path} was written in version {version} of the format, and this prismscale reads "
            f"version {VERSION}; make it again (--fresh), or read it with the one that wrote it"
        )
    if not file.schema_arrow.equals(schema):
        raise FormatError(f"{path} has other columns than a prismscale {kind}; make it again")
    # The footer's figures are checked before any column is read. The memory limit covers columns
    # that hold more than the footer says.
    _refuse_bombs(path, file.metadata)
    with memory_limited(_BYTES_A_VALUE * MAX_VALUES):
        return file.read(), header


def _refuse_bombs(path: Path, footer: pq.FileMetaData) -> None:
    # Single columns are not inspected: pyarrow ends the process if their statistics are damaged.
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    n_bytes = sum(group.total_byte_size for group in groups)
    if footer.num_rows > MAX_VALUES or n_bytes > 8 * MAX_VALUES:
        raise FormatError(
            f"{path} claims {footer.num_rows:,} rows and {n_bytes:,} bytes; "
            f"at most {MAX_VALUES:,} values are read"
        )


def numbers(table: pa.Table, name: str) -> NDArray[Any]:
    """Return a plain column as an array with memory of its own, which may be kept."""
    found = table[name]
    none = np.zeros(0, found.type.to_pandas_dtype())
    return np.concatenate([none, *map(_values, found.chunks)])


def _values(array: pa.Array) -> NDArray[Any]:
    """Return a view of an array's numbers, of which none are missing; see :func:`column`."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.zeros(0, dtype)
    start = array.offset * dtype.itemsize
    return np.frombuffer(array.buffers()[-1], dtype, count=len(array), offset=start)


def lists(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a list column as row pointers (length rows + 1) and concatenated values."""
    chunks = table[name].chunks
    lengths = [np.diff(_values(chunk.offsets)) for chunk in chunks]
    values = [_values(chunk.flatten()) for chunk in chunks]
    if not chunks:
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate([[0], np.cumsum(np.concatenate(lengths))]), np.concatenate(values)


def to_runs(values: Sequence[int]) -> list[int]:
    """Encode whole numbers as runs ``[start, step, count, …]``.

    A mesh axis is one run, a rank class a few. A run of one number has step 1.
    """
    n = len(values)
    # Most groups are a single run, and comparing with a range is far faster than the loop below.
    step = values[1] - values[0] if n > 1 else 1
    if n and step and tuple(values) == tuple(range(values[0], values[0] + step * n, step)):
        return [values[0], step, n]
    runs: list[int] = []
    i = 0
    while i < n:
        step, count = values[i + 1] - values[i] if i + 1 < n else 1, 1
        while i + count < n and values[i + count] == values[i] + step * count:
            count += 1
        runs += (values[i], step if count > 1 else 1, count)
        i += count
    return runs


@dataclass(kw_only=True, slots=True)
class Header:
    """One object of a file's JSON header.

    Getters check values. If one is missing, of the wrong type or out of range, they raise a
    :class:`FormatError` that names the file and the place.
    """

    path: Path
    place: str
    content: Any
    left: list[int] = field(default_factory=lambda: [MAX_UNFOLDED])
    """How many numbers the runs of the file may still unfold to (shared by all its sections)."""
    unfolded: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)
    """Cache of unfolded runs: thousands of traces list the same thousands of groups."""

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a whole number in ``[low, high]``."""
        value = self._get(key)
        # ``isinstance`` would take ``true`` for a number.
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"must be a whole number from {low} to {high}")
        return value

    def text(self, key: str) -> str:
        """Return a string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._list(key)
        if not all(isinstance(v, str) for v in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, str]:
        """Return a JSON object whose values are strings."""
        value = self._get(key)
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self.error(key, "must be a table of strings")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of whole numbers in ``[low, high]``."""
        value = self._list(key)
        if not all(type(v) is int and low <= v <= high for v in value):
            raise self.error(key, f"must be a list of whole numbers from {low} to {high}")
        return tuple(value)

    def rows(self, key: str, kinds: tuple[type, ...]) -> list[list[Any]]:
        """Return a list of rows whose cells are of ``kinds``."""
        value = self._list(key)
        for row in value:
            if not isinstance(row, list) or tuple(map(type, row)) != kinds:
                raise self.error(key, "has a row of the wrong form")
        return value

    def has(self, key: str) -> bool:
        """Return True if ``key`` is present and not null."""
        return isinstance(self.content, dict) and self.content.get(key) is not None

    def section(self, key: str) -> Header:
        """Return a nested object."""
        return self._child(f"{self.place}.{key}", self._get(key))

    def sections(self, key: str) -> list[Header]:
        """Return a list of nested objects."""
        return [self._child(f"{self.place}.{key}[{n}]", v) for n, v in enumerate(self._list(key))]

    def runs(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return whole numbers in ``[low, high)`` that :func:`to_runs` wrote."""
        runs = self._list(key)
        # The cache key is text: nothing is checked yet, and some JSON values cannot be hashed.
        name = (low, high, *map(str, runs))
        if name not in self.unfolded:
            self.unfolded[name] = self.unfold(key, runs, low, high)
        return self.unfolded[name]

    def many_runs(self, key: str, low: int, high: int) -> list[tuple[int, ...]]:
        """Return a list of sequences that :func:`to_runs` wrote, each as :meth:`runs` does."""
        return [self.unfold(key, runs, low, high) for runs in self._list(key)]

    def unfold(self, key: str, runs: Any, low: int, high: int) -> tuple[int, ...]:
        """Return the numbers of ``runs``. They are checked before they are built."""
        if not isinstance(runs, list) or len(runs) % 3 or not all(type(r) is int for r in runs):
            raise self.error(key, "must be runs of whole numbers: start, step, count, …")
        pieces: list[Sequence[int]] = []
        for start, step, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            last = start + step * (count - 1)
            if count < 1 or not (low <= start < high and low <= last < high):
                raise self.error(key, f"has numbers outside {low} … {high - 1}")
            self.spend(key, count)
            beyond = last + (1 if step > 0 else -1)
            pieces.append(range(start, beyond, step) if step else [start] * count)
        return tuple(itertools.chain.from_iterable(pieces))

    def spend(self, key: str, count: int) -> None:
        """Count ``count`` numbers that are about to be built; raise if the file has too many."""
        self.left[0] -= count
        if self.left[0] < 0:
            raise self.error(key, f"unfolds to more than {MAX_UNFOLDED:,} numbers")

    def error(self, key: str, what: str) -> FormatError:
        """Return the error for ``key``."""
        return FormatError(f"{self.path}: {self.place}.{key} {what}; the file must be made again")

    def _get(self, key: str) -> Any:
        if not isinstance(self.content, dict) or key not in self.content:
            raise self.error(key, "is missing")
        return self.content[key]

    def _list(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self.error(key, "must be a list")
        return value

    def _child(self, place: str, content: Any) -> Header:
        return Header(
            path=self.path, place=place, content=content, left=self.left, unfolded=self.unfolded
        )


def join(rows: Iterable[NDArray[Any]], kind: type) -> NDArray[Any]:
    """Concatenate arrays; no arrays give an empty one."""
    return np.concatenate([np.zeros(0, dtype=kind), *(np.asarray(r, dtype=kind) for r in rows)])
