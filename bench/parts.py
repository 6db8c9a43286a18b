"""Runs a bench part by part: its rows are on disk as they come, and one that was ended goes on."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from prismscale.validation.rows import Row, finish, read_rows, write_rows
from runs import HERE

Part = Callable[[Path], list[Row]]
"""Measures one part in a folder that all parts share; a run that is there may be used again."""


def run_parts(parts: Mapping[str, Part], *, title: str, doc: str | None) -> int:
    """Run those that the command line asks for; returns the exit code. ``doc``: of the bench."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    told = "a name, * and ? as in file names; without one, parts of which PATH has no rows:\n"
    parser.add_argument("--part", action="append", help=told + "\n".join(parts))
    parser.add_argument("--json", type=Path, metavar="PATH", help="rows, after each part")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for runs, which are kept")
    options = parser.parse_args()
    rows = read_rows(options.json)
    if options.part is None:
        chosen = [name for name in parts if not any(_is_of(name, row) for row in rows)]
    else:
        chosen = [n for n in parts if any(fnmatchcase(n, given) for given in options.part)]
        for given in options.part:
            if not any(fnmatchcase(name, given) for name in chosen):
                parser.error(f"--part {given!r} fits none of: {', '.join(parts)}")
    find_ours()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            found = [replace(row, name=f"{name}: {row.name}") for row in parts[name](folder)]
            for row in found:
                print(f"{row.name}: {row.value:.6g} {row.unit}", flush=True)
            rows = [row for row in rows if not _is_of(name, row)] + found
            if options.json:
                write_rows(rows, options.json)
    return finish(rows, title=title, json_path=options.json)


def find_ours() -> None:
    """Let processes that are started from now on import prismscale and benches from here."""
    ours = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, ours))


def _is_of(part: str, row: Row) -> bool:
    return row.name.startswith(f"{part}: ")
