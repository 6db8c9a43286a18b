"""What every reader of a file that others wrote stands behind.

A damaged or hostile file makes decoders raise nearly anything: a number of thousands of digits a
ValueError, nesting a RecursionError, an index beyond 64 bits an OverflowError, a text in place of a
list a TypeError. To the user it is one thing: this file cannot be read.
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
"""What decoders raise for files that are not theirs. Not MemoryError: what a file may make us hold
is bounded where it is read."""
_PAGE = resource.getpagesize()


@contextmanager
def reading(name: object, what: str) -> Iterator[None]:
    """The block reads a foreign file. What it refuses itself, in better words, stays.

    Args:
        name: of the file, or what else the user knows it by.
        what: it should be, for example ``a Chakra trace``.

    Raises:
        FormatError: anything in :data:`DAMAGE`.
    """
    try:
        yield
    except DAMAGE as error:
        said = str(error)[:200] or "it is damaged"
        raise FormatError(f"{name} is not {what}: {type(error).__name__}, {said}") from error


@contextmanager
def memory_limited(more: int) -> Iterator[None]:
    """This process may take so many bytes more; what asks for more gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    allowed = [limit for limit in (soft, now + more) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
