"""``bench/house.py`` finds what it says it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def house(bench_module: Callable[[str], Any]) -> Any:
    """The bench as a module."""
    return bench_module("house")


def written(root: Path, **files: str) -> Path:
    """A package of these modules; ``__`` in a name stands for a folder."""
    package = root / "prismscale"
    for name, text in {"__init__": "", "cli": "", **files}.items():
        path = package / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return root


def test_the_house_is_in_order(house: Any) -> None:
    """Every bar of our own source is met."""
    assert [row.name for row in house.rows_of() if not row.ok] == []


def test_a_module_that_nobody_imports_is_named(house: Any, tmp_path: Path) -> None:
    """Reached are the command line, what it imports inside functions, and processes."""
    root = written(
        tmp_path,
        cli="def run():\n    from prismscale import used\n",
        used="from prismscale.room.deep import f\n",
        room__deep="def f(): ...\n",
        process="if __name__ == '__main__':\n    pass\n",
        dead="import prismscale.used\n",
    )
    assert house.unreached(house.modules_of(root)) == {"prismscale.dead"}


def test_a_circle_for_types_only_is_a_circle(house: Any, tmp_path: Path) -> None:
    """Of three modules, beside one that imports them."""
    root = written(
        tmp_path,
        cli="import prismscale.a\n",
        a="from prismscale import b\n",
        b="from prismscale.c import C\n",
        c="if TYPE_CHECKING:\n    from prismscale import a\n",
    )
    names = {f"prismscale.{name}" for name in "abc"}
    assert house.circles(house.modules_of(root)) == [names]


def test_a_name_in_two_rooms_is_found(house: Any) -> None:
    """With the rooms."""
    found = house.repeated([("Job", "graph"), ("Step", "sim"), ("Job", "live")])
    assert found == {"Job": ["graph", "live"]}
