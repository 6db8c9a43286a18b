"""Reads JSON files larger than memory piece by piece: plain, gzipped or in a tar archive.

Only the members of one top-level array are streamed; everything else at the top must fit in memory.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from prismscale.errors import FormatError

CHUNK = 1 << 20
LARGEST_VALUE = 1 << 24
"""Most characters of one value: 16 MB are no event but a damaged file. As Python objects they take
up to thirty times as much."""

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


def documents(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield each JSON file at ``path`` as (name, bytes): the file, or members of a tar archive.

    A document must be read before the next one is asked for.

    Raises:
        FormatError: a file is missing, truncated or no archive.
    """
    with _damage_named(str(path)):
        if path.name.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(path) as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isfile() else None
                    if file is not None and ".json" in member.name:
                        yield f"{path}:{member.name}", _unpacked(file, member.name)
            return
        with path.open("rb") as file:
            yield str(path), _unpacked(file, path.name)


def members(name: str, file: IO[bytes], array: str) -> Iterator[tuple[str, Any]]:
    """Yield top-level members of a JSON object as (key, value), and ``array``'s items one by one.

    A document that is an array itself is taken as that array.

    Raises:
        FormatError: the document is truncated, no JSON, or neither object nor array.
    """
    with _damage_named(name):
        text = _Text(name, file)
        opening = text.take("{[", "the start of an object or array")
        if opening == "[":
            yield from ((array, item) for item in _items(text))
            return
        if text.peek() == "}":
            return
        while True:
            key = text.value()
            text.take(":", "':'")
            if key == array and text.peek() == "[":
                text.take("[", "'['")
                yield from ((array, item) for item in _items(text))
            else:
                yield str(key), text.value()
            if text.take(",}", "',' or '}'") == "}":
                return


def _items(text: _Text) -> Iterator[Any]:
    if text.peek() == "]":
        text.take("]", "']'")
        return
    while True:
        yield text.value()
        if text.take(",]", "',' or ']'") == "]":
            return


def _unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    return gzip.open(file) if name.endswith(".gz") else file  # type: ignore[return-value]


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    try:
        yield
    except (
        EOFError,
        zlib.error,
        lzma.LZMAError,
        gzip.BadGzipFile,
        tarfile.TarError,
        OverflowError,
    ) as error:
        raise FormatError(f"{name}: truncated or damaged archive ({error})") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: no text ({error})") from error
    except OSError as error:
        raise FormatError(f"{name}: cannot be read ({error.strerror or error})") from error


class _Text:
    """A window on the text: text behind it is dropped, text ahead of it is read when needed."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._window = ""
        self._at = 0
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._window):
                return self._window[self._at]
            if not self._more():
                return ""

    def take(self, allowed: str, what: str) -> str:
        """Consume the next character that is no space, which must be one of ``allowed``."""
        found = self.peek()
        if not found:
            raise FormatError(f"{self._name}: ends where {what} was expected (truncated?)")
        if found not in allowed:
            raise FormatError(f"{self._name}: found {found!r} where {what} was expected")
        self._at += 1
        return found

    def value(self) -> Any:
        """Consume one JSON value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                # The value may simply reach beyond the window.
                if len(self._window) - self._at > LARGEST_VALUE or not self._more():
                    raise FormatError(
                        f"{self._name}: no JSON, or truncated ({error.msg})"
                    ) from error
                continue
            except ValueError as error:
                # An integer of thousands of digits.
                raise FormatError(f"{self._name}: {error}") from error
            except RecursionError as error:
                raise FormatError(f"{self._name}: nested too deeply") from error
            if isinstance(value, (int, float)) and self._may_go_on(end) and self._more():
                continue
            self._at = end
            return value

    def _may_go_on(self, end: int) -> bool:
        """True where a number reaches the edge of the window: ``1`` may become ``1.5e3``."""
        while end < len(self._window) and self._window[end] in "0123456789+-.eE":
            end += 1
        return end == len(self._window)

    def _more(self) -> bool:
        if self._ended:
            return False
        # Doubling keeps the repeated decoding of one long value linear.
        chunk = self._file.read(max(CHUNK, len(self._window) - self._at))
        self._ended = not chunk
        self._window = self._window[self._at :] + self._decoder.decode(chunk, final=self._ended)
        self._at = 0
        return not self._ended
