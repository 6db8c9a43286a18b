"""Protects every reader of a file that another program wrote.

A damaged or hostile file makes decoders raise nearly anything: ValueError for a number with
thousands of digits, RecursionError for deep nesting, OverflowError for an index beyond 64 bits,
TypeError for a text in place of a list. To the user all mean the same: this file cannot be read.
"""

from __future__ import annotations

import csv
import lzma
import resource
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from prismscale.errors import FormatError

DAMAGE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
    EOFError,
    csv.Error,
    lzma.LZMAError,
    tarfile.TarError,
    zlib.error,
    pa.ArrowException,
)
"""Exceptions that decoders raise for damaged or foreign files. MemoryError is not among them: each
reader limits the memory that a file may take."""
_PAGE = resource.getpagesize()


@contextmanager
def reading(name: object, what: str) -> Iterator[None]:
    """Turn decoder errors of the block, which reads a foreign file, into a :class:`FormatError`.

    A :class:`FormatError` that the block itself raises, with a better message, passes unchanged.

    Args:
        name: name of the file, or whatever else the user knows it by.
        what: what the file should be, for example ``a Chakra trace``.

    Raises:
        FormatError: the block raised an exception in :data:`DAMAGE`.
    """
    try:
        yield
    except DAMAGE as error:
        said = str(error)[:200] or "it is damaged"
        raise FormatError(f"{name} is not {what}: {type(error).__name__}, {said}") from error


@contextmanager
def memory_limited(more: int) -> Iterator[None]:
    """Limit this process to ``more`` bytes more than now; beyond that it gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    allowed = [limit for limit in (soft, now + more) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
