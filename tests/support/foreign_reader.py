"""A reader of files that others write, with a good file and the damage that suits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.damage import Damage, bytes_damaged, table_damaged


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader."""

    name: str
    format: str
    """``text`` or ``Parquet``: they have different bars."""
    path: str
    """Of the file that is damaged, within a folder."""
    files: Mapping[str, bytes]
    """Good ones, by path."""
    damages: tuple[Damage, ...]
    read: Callable[[Path], object]
    """What a command does with the path; a text is what it shows."""


def reader_of(
    name: str, path: str, data: bytes, read: Callable[[Path], object], *damages: Damage
) -> Reader:
    """A reader of one file by itself."""
    is_table = table_damaged in damages
    return Reader(
        name=name,
        format="Parquet" if is_table else "text",
        path=path,
        files={path: data},
        damages=(*damages, bytes_damaged),
        read=read,
    )


def written(reader: Reader, folder: Path) -> Path:
    """The good files in ``folder``; returns the one that is to be damaged."""
    for name, data in reader.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / reader.path
