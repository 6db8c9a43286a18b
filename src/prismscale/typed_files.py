"""Reads and writes dataclasses strictly, as TOML for people and as JSON between processes.

The layout of the file is the layout of the class: a field is a key, a nested dataclass a table, a
tuple an array, an enumeration its member's name in lower case. Unknown keys are refused, because a
misspelt key that is silently ignored gives wrong figures.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from prismscale.errors import FormatError, UsageError, did_you_mean, shown
from prismscale.files import write_json

T = TypeVar("T")
MOST_FILE_BYTES = 256 << 20
"""Largest text file that is read, because it is read as a whole."""
LARGEST_INT = 2**63 - 1
"""Largest whole number that is read: prismscale's tables hold 64 bits."""


def parse(text: str, origin: str) -> dict[str, Any]:
    """Return the table of TOML text; ``origin`` names the text in errors.

    Raises:
        FormatError: the text is not TOML.
    """
    with _damage_named(origin, "TOML"):
        return tomllib.loads(text)


def read(path: Path, what: str) -> dict[str, Any]:
    """Return the table of a TOML file; ``what`` says in errors what the file should be.

    Raises:
        UsageError: the file cannot be read.
        FormatError: the file is not TOML.
    """
    try:
        text = text_of(path)
    except OSError as error:
        raise UsageError(f"cannot read {what} '{path}': {error.strerror}") from error
    return parse(text, str(path))


def parse_json(text: str, origin: str) -> Any:
    """Return the value of JSON text from another program; ``origin`` names the text in errors.

    Raises:
        FormatError: the text is not JSON, or nested too deeply.
    """
    with _damage_named(origin, "JSON"):
        return json.loads(text)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        FormatError: the file cannot be read, is too large, or is not JSON.
    """
    try:
        text = text_of(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_json(text, str(path))


def text_of(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a UTF-8 file; ``errors`` is that of :func:`open`.

    Raises:
        OSError: the file cannot be read.
        FormatError: the file is too large, or not text.
    """
    if path.stat().st_size > MOST_FILE_BYTES:
        raise FormatError(f"{path}: larger than {MOST_FILE_BYTES >> 20} MiB")
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file ({error.reason})") from error


@contextmanager
def _damage_named(origin: str, what: str) -> Iterator[None]:
    """Turn the errors of a JSON or TOML decoder into a :class:`FormatError`.

    A decoder also raises ValueError for a number with thousands of digits, and RecursionError for
    deep nesting.
    """
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{origin}: not valid {what}: {error}") from error
    except RecursionError as error:
        raise FormatError(f"{origin}: not valid {what}: nested too deeply") from error


def overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``under`` with its values replaced by those of ``over``, nested tables key by key."""
    found = dict(under)
    for key, value in over.items():
        below = found.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            found[key] = overlaid(below, value)
        else:
            found[key] = value
    return found


def decode(cls: type[T], table: Mapping[str, Any], origin: str, prefix: str = "") -> T:
    """Build ``cls`` from a parsed TOML table; ``origin`` names the file in errors.

    Raises:
        FormatError: a key is missing, unknown, of the wrong type or out of range; it is named.
    """
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    for key in table:
        if key not in fields:
            hint = did_you_mean(key, fields)
            raise FormatError(f"{origin}: unknown key '{prefix}{key}'; {hint}")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name in table:
            values[name] = _decode_value(hints[name], table[name], origin, f"{prefix}{name}")
        elif _is_required(spec) and type(None) in get_args(hints[name]):
            values[name] = None
        elif _is_required(spec):
            raise FormatError(f"{origin}: key '{prefix}{name}' is missing")
    try:
        return cls(**values)
    except (UsageError, OverflowError) as error:
        where = prefix.rstrip(".") or "the file"
        raise FormatError(f"{origin}: {where}: {error}") from error


def encode(value: Any) -> str:
    """Return a dataclass as TOML text; ``None``, empty tables and default values are left out.

    :func:`decode` gives the same object back.
    """
    lines: list[str] = []
    _encode_table(plain(value), "", lines)
    return "\n".join(lines).strip() + "\n"


def save_json(value: Any, path: Path) -> None:
    """Write a dataclass as JSON, for :func:`load_json`. Raises :class:`StorageError`."""
    write_json(path, plain(value))


def load_json(cls: type[T], path: Path, what: str) -> T:
    """Read a file of :func:`save_json`; ``what`` says in errors what the file should describe.

    Raises:
        FormatError: the file cannot be read, or is not such a file.
    """
    try:
        table = parse_json(text_of(path), str(path))
    except (OSError, FormatError) as error:
        raise FormatError(f"{path} does not describe {what}: {error}") from error
    if not isinstance(table, dict):
        raise FormatError(f"{path} does not describe {what}: it holds no table")
    return decode(cls, table, f"{path} does not describe {what}")


def plain(value: Any) -> Any:
    """Return a value as plain tables, arrays and scalars.

    ``None`` and default values are left out. :func:`decode` gives the same object back.
    """
    if dataclasses.is_dataclass(value):
        fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: plain(v) for f, v in fields if v is not None and v != f.default}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value.name.lower() if isinstance(value, Enum) else value


def _is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


def _decode_value(hint: Any, value: Any, origin: str, key: str) -> Any:
    kind = get_origin(hint)
    if kind in (Union, types.UnionType):
        (inner,) = (a for a in get_args(hint) if a is not type(None))
        if value is None:  # JSON says null; TOML, which has none, leaves the key out
            return None
        return _decode_value(inner, value, origin, key)
    if dataclasses.is_dataclass(hint):
        checked = _expect(value, dict, "a table", origin, key)
        return decode(cast(type[Any], hint), checked, origin, f"{key}.")
    if kind is tuple:
        items = _expect(value, list, "an array", origin, key)
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            inner = (inner[0],) * len(items)
        elif len(inner) != len(items):
            raise FormatError(
                f"{origin}: key '{key}' has {len(items):,} values; expected {len(inner)}"
            )
        return tuple(
            _decode_value(of, value, origin, f"{key}[{i}]")
            for i, (of, value) in enumerate(zip(inner, items, strict=True))
        )
    if kind is not None and issubclass(kind, Mapping):
        table = _expect(value, dict, "a table", origin, key)
        name, inner = get_args(hint)
        return {
            _decode_key(name, k, origin, key): _decode_value(inner, v, origin, f"{key}.{k}")
            for k, v in table.items()
        }
    return _decode_scalar(hint, value, origin, key)


def _decode_key(hint: Any, name: str, origin: str, key: str) -> Any:
    """Return a name in a table, which is text in the file, as the class's type: text or int."""
    if hint is not int:
        return name
    try:
        return int(name)
    except ValueError:
        raise FormatError(
            f"{origin}: key '{key}.{name}'; expected a whole number as name"
        ) from None


def _decode_scalar(hint: Any, value: Any, origin: str, key: str) -> Any:
    if hint is float:
        number = _expect(value, (int, float), "a number", origin, key)
        # A whole number can be larger than the largest float.
        if abs(number) > sys.float_info.max or not math.isfinite(number):
            raise FormatError(f"{origin}: key '{key}' is {shown(value)}; expected a finite number")
        return float(number)
    if hint is bool:
        if not isinstance(value, bool):
            raise FormatError(f"{origin}: key '{key}' is {shown(value)}; expected true or false")
        return value
    if hint is int:
        number = _expect(value, int, "a whole number", origin, key)
        if abs(number) > LARGEST_INT:
            raise FormatError(f"{origin}: key '{key}' is {shown(value)}; it must be below 2**63")
        return number
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = {m.name.lower(): m for m in hint}
        if not isinstance(value, str) or value not in members:
            allowed = did_you_mean(value if isinstance(value, str) else "", members)
            raise FormatError(f"{origin}: key '{key}' is {shown(value)}; {allowed}")
        return members[value]
    return _expect(value, str, "a string", origin, key)


def _expect(value: Any, kind: Any, words: str, origin: str, key: str) -> Any:
    # bool is an int in Python, but not for anyone who writes a file.
    if isinstance(value, bool) or not isinstance(value, kind):
        raise FormatError(f"{origin}: key '{key}' is {shown(value)}; expected {words}")
    return value


def _encode_table(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    nested = {k: v for k, v in table.items() if isinstance(v, dict) or _is_table_array(v)}
    for key, value in table.items():
        if key not in nested:
            lines.append(f"{_key(key)} = {_literal(value)}")
    for key, value in nested.items():
        inner = f"{path}{_key(key)}"
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(value, list):
                lines += ["", f"[[{inner}]]"]
            elif not all(isinstance(v, dict) for v in entry.values()):
                lines += ["", f"[{inner}]"]
            _encode_table(entry, f"{inner}.", lines)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _key(key: str) -> str:
    bare = key.replace("-", "").replace("_", "")
    return key if bare.isascii() and bare.isalnum() else json.dumps(key)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    # JSON strings and numbers are valid TOML (TOML basic strings use the same escapes).
    return json.dumps(value, ensure_ascii=False)
