"""Damages files as accidents and attackers do: what they hold, and the bytes that they are."""

from __future__ import annotations

import copy
import io
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0,
    1e308, -1e308, "", " ", "0", "-1", "1e999", "nan", "\x00", "\x1b[2J\x1b]0;x\x07", "\u202e",
    "<script>alert(1)</script>", "[/bold]", "[red]", "../../etc/passwd", "é" * 50, "x" * 5000,
    "9" * 5000, [], {}, [[]], [{}], {"": 1}, [None] * 50, [[1], [2]], {"rank": {"rank": 1}},
)  # fmt: skip
"""Values in place of what belongs there."""
LITERALS = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 4400, "[" * 3000, '{"a":' * 3000,
    '"\\ud800"', "0x10", "01", "1_000", "'a'", "", ",", ":", "}", "]", "[", "{", '"', "\\", "\x00",
    "inf", "nan", "+inf", "1979-05-27", "true", '"""', "# ", "=", ".", "[[a]]", "é", "\ufeff",
    "[" + "[" * 200, "a." * 2000 + "b = 1",
)  # fmt: skip
"""Text in place of a value."""
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\w+|[^\s\w]')
Damage = Callable[[bytes, random.Random], bytes]


def bytes_damaged(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, parts cut out, doubled, moved, or overwritten; or the end missing."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not found:
            return bytes(found)
        at, n = rng.randrange(len(found)), rng.choice((1, 2, 4, 8, 64, 512))
        kind = rng.randrange(7)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + n]
        elif kind == 2:
            found[at:at] = found[at : at + n]
        elif kind == 3:
            found[at : at + n] = rng.randbytes(min(n, len(found) - at))
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            found[at : at + n] = rng.choice((b"\xff", b"\x00", b"\x80", b"\x7f")) * n
        else:
            other = rng.randrange(len(found))
            found[at : at + n] = found[other : other + n]
    return bytes(found)


def text_damaged(data: bytes, rng: random.Random) -> bytes:
    """Words of a text replaced, left out, doubled or exchanged."""
    text = data.decode("utf-8", "replace")
    for _ in range(rng.choice((1, 1, 2, 5))):
        words = list(_TOKENS.finditer(text))
        if not words:
            break
        one, other = rng.choice(words), rng.choice(words)
        new = rng.choice(
            (other[0], "", one[0] * 2, rng.choice(LITERALS), json.dumps(_hostile(rng)))
        )
        text = text[: one.start()] + new + text[one.end() :]
    return text.encode("utf-8", "surrogatepass")


def json_damaged(data: bytes, rng: random.Random) -> bytes:
    """Values of a JSON document replaced by hostile ones; keys lost, renamed, or moved."""
    found = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = _place(found, rng)
        if place is None:
            found = _hostile(rng)
            continue
        holder, key = place
        kind = rng.randrange(6)
        if kind < 3:
            holder[key] = _hostile(rng)
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice((key + "x", key.upper(), "\x1b[31m", "x" * 3000))] = holder.pop(key)
        else:
            other = _place(found, rng)
            if other is not None:
                # Copied, so that nothing holds itself.
                holder[key] = json.loads(json.dumps(other[0][other[1]]))
    text = json.dumps(found, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _hostile(rng: random.Random) -> Any:
    """A copy: what is put into it later must not be there in the next case."""
    return copy.deepcopy(rng.choice(HOSTILE))


def _place(document: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """Somewhere in a document: a container, and a key or index of it."""
    holder = document
    while True:
        if not isinstance(holder, dict | list) or not holder:
            return None
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys)
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
            return holder, key
        holder = inner


def varints_damaged(data: bytes, rng: random.Random) -> bytes:
    """Fields of messages behind their lengths: tags, lengths and numbers replaced."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        if not found:
            break
        at = rng.randrange(len(found))
        number = rng.choice((0, 1, 2, 7, 8, 10, 0x7A, 127, 128, 2**31, 2**35, 2**63, 2**64 - 1))
        varint = bytearray()
        while number > 0x7F:
            varint.append(number & 0x7F | 0x80)
            number >>= 7
        varint.append(number)
        found[at : at + rng.choice((0, 1, 1, 2))] = varint
    return bytes(found)


def rows_damaged(data: bytes, rng: random.Random) -> bytes:
    """Cells of a CSV replaced, rows and columns lost or doubled, quotes unbalanced."""
    rows = [line.split(",") for line in data.decode().splitlines()]
    for _ in range(rng.choice((1, 1, 3))):
        row = rng.choice(rows)
        kind, at = rng.randrange(6), rng.randrange(len(row))
        if kind < 3:
            row[at] = rng.choice((str(_hostile(rng)), rng.choice(LITERALS)))
        elif kind == 3:
            del row[at]
            row or row.append("")
        elif kind == 4:
            rows.insert(rng.randrange(len(rows)), list(rng.choice(rows)))
        else:
            row.insert(at, rng.choice(('"', '""', "\x00", "\r", "\n", "x" * 140_000)))
    return "\n".join(",".join(row) for row in rows).encode("utf-8", "surrogatepass")


def table_damaged(data: bytes, rng: random.Random) -> bytes:
    """Columns of a Parquet table lost, of another type, with nulls, extremes, or other metadata."""
    table = pq.read_table(pa.BufferReader(data))
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not table.num_columns:
            break
        table = _column_damaged(table, rng.randrange(table.num_columns), rng)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression=rng.choice(("none", "snappy")))
    return sink.getvalue()


def _column_damaged(table: pa.Table, at: int, rng: random.Random) -> pa.Table:
    name, column = table.column_names[at], table.column(at)
    kind = rng.randrange(6)
    if kind == 0:
        return table.remove_column(at)
    if kind == 1:
        text = pa.array([rng.choice(("", "x", "\x1b[31m", "9" * 400))] * len(column))
        return table.set_column(at, name, text)
    if kind == 2:
        return table.slice(rng.randrange(table.num_rows + 1))
    if kind == 3:
        metadata = dict(table.schema.metadata or {})
        for key in list(metadata):
            damage = rng.choice((bytes_damaged, text_damaged, lambda data, rng: b""))
            metadata[key] = damage(metadata[key], rng)
        return table.replace_schema_metadata(metadata)
    values = column.to_pylist()
    for _ in range(rng.choice((1, 1, 8))):
        if values:
            spot = rng.randrange(len(values))
            values[spot] = _extreme(values[spot], rng)
    try:
        return table.set_column(at, name, pa.array(values))
    except (pa.ArrowException, OverflowError):
        return table.remove_column(at)


def _extreme(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str | bytes):
        return rng.choice(("", None, "x" * 300, "\x1b[2J"))
    if isinstance(value, list):
        return rng.choice(([], None, value * 2, [-1], [2**40]))
    if isinstance(value, float):
        return rng.choice((None, -1.0, 0.0, 1e300, float("nan"), float("inf")))
    return rng.choice((None, -1, 0, 1, 2**15, 2**31 - 1, 2**40, 2**62, -(2**62), int(np.int64(7))))
