"""Reads a pickle that holds containers, numbers and strings, and nothing else.

A pickle can call any function of any module while it is read. This reader calls none: it refuses
the name of every class and function before it is looked up.

[Note: memory] A pickle of 20 bytes can ask for a memo of 2**31 places, which the C implementation
fills with zeros. The memory that reading may take is therefore limited during the call.
"""

from __future__ import annotations

import io
import pickle
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NoReturn

from prismscale.errors import FormatError
from prismscale.foreign import memory_limited

MOST_FILE_BYTES = 1 << 30
"""Largest file of one rank. The recorder keeps 2,000 calls by default: about a megabyte."""
BYTES_A_BYTE = 64
"""Most bytes of memory that an object takes for each byte of its pickle."""
SPARE_BYTES = 64 << 20


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"it names {module[:40]}.{name[:40]}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references to objects outside the file."""
        raise pickle.UnpicklingError("it refers to something outside the file")


def load_plain_pickle(path: Path) -> Any:
    """Return the object in a pickle file.

    Raises:
        FormatError: the file cannot be read, is no pickle, or holds anything but containers,
            numbers and strings.
    """
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise FormatError(f"{path}: larger than {MOST_FILE_BYTES >> 20:,} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    return plain_pickle(data, str(path))


def plain_pickle(data: bytes, name: str) -> Any:
    """Return the object in pickled bytes; errors call the bytes ``name``.

    Raises:
        FormatError: as :func:`load_plain_pickle`.
    """
    try:
        # CPython prints an error about a bytearray for which there was no memory.
        with memory_limited(SPARE_BYTES + BYTES_A_BYTE * len(data)), redirect_stderr(None):
            return _PlainUnpickler(io.BytesIO(data)).load()
    # Damaged pickles raise nearly every exception there is, because opcodes use whatever is on the
    # stack without checking it.
    except Exception as error:
        raise FormatError(
            f"{name}: no pickle of plain containers, numbers and strings "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
