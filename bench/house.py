"""The structure of the source, in figures: ``python bench/house.py [--json PATH]``.

Counted from the syntax trees, without running anything. A module is reached if it is imported, at
once or inside a function, from the command line or from a module that runs as a process
(``python -m prismscale.…``). ``make lint`` runs this.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prismscale.validation.rows import Row, finish

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "prismscale"
MOST_FILES = 18
ENTRY_MODULES = ("cli",)


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file of the package."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def is_process(self) -> bool:
        """Whether it runs with ``python -m``."""
        return any(
            isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            for node in self.tree.body
        )

    def imports(self, modules: Mapping[str, Module]) -> Iterator[str]:
        """Modules of the package that it imports, for types only, too; and their packages."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module in modules:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in modules else node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in modules)


def modules_of(root: Path) -> dict[str, Module]:
    """All modules below ``root``, by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name=name, path=path)
    return found


def unreached(modules: Mapping[str, Module]) -> set[str]:
    """Modules that no entry point comes to."""
    entries = {f"{PACKAGE}.{name}" for name in ENTRY_MODULES} | {PACKAGE}
    left = [*entries, *(name for name, module in modules.items() if module.is_process)]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        left += [
            *modules[name].imports(modules),
            *([name.rpartition(".")[0]] if "." in name else []),
        ]
    return set(modules) - seen


def circles(modules: Mapping[str, Module]) -> list[set[str]]:
    """Sets of modules that import each other (Kosaraju's strongly connected components)."""
    after = {name: set(module.imports(modules)) - {name} for name, module in modules.items()}
    before: dict[str, set[str]] = defaultdict(set)
    for name, imported in after.items():
        for other in imported:
            before[other].add(name)
    order: list[str] = []
    seen: set[str] = set()
    for name in modules:
        order += list(_visited(name, after, seen))
    seen.clear()
    found = [set(_visited(name, before, seen)) for name in reversed(order)]
    return [component for component in found if len(component) > 1]


def _visited(start: str, edges: Mapping[str, set[str]], seen: set[str]) -> Iterator[str]:
    """What is reached from ``start`` and was not before, in the order in which it is left."""
    stack = [(start, iter(sorted(edges.get(start, ()))))] if start not in seen else []
    seen.add(start)
    while stack:
        name, rest = stack[-1]
        onward = next((other for other in rest if other not in seen), None)
        if onward is None:
            stack.pop()
            yield name
        else:
            seen.add(onward)
            stack.append((onward, iter(sorted(edges.get(onward, ())))))


def repeated(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in several places."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def comments(path: Path) -> int:
    """Comments, without those that speak to tools."""
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        texts = [t.string for t in tokens if t.type == tokenize.COMMENT]
    return sum(not t.startswith(("# type:", "# noqa", "# fmt:")) for t in texts)


def functions(modules: Mapping[str, Module]) -> list[int]:
    """Lines of every function."""
    return sorted(
        node.end_lineno - node.lineno + 1
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )


def rows_of(root: Path = SOURCE) -> list[Row]:
    """All figures; what breaks a bar is named on standard error."""
    modules = modules_of(root)
    files = [m for m in modules.values() if m.path.name != "__init__.py"]
    folders = Counter(m.path.parent for m in files)
    lines = {m.name: m.path.read_text(encoding="utf-8").count("\n") for m in files}
    classes = (
        (node.name, m.name) for m in files for node in m.tree.body if isinstance(node, ast.ClassDef)
    )
    broken: dict[str, Collection[object]] = {
        "modules that no entry point reaches": sorted(unreached(modules)),
        "circles of imports, for types only among them": circles(modules),
        "file names in several rooms": repeated((m.path.name, m.name) for m in files),
        "class names in several modules": repeated(classes),
    }
    for what, found in broken.items():
        if found:
            print(f"{what}: {found}", file=sys.stderr)
    lengths = functions(modules)
    said = sum(comments(m.path) for m in files)
    return [
        *(Row.at_most(what, len(found), 0) for what, found in broken.items()),
        Row.at_most("files in the largest folder", max(folders.values()), MOST_FILES),
        Row.told("files", len(files)),
        Row.told("lines", sum(lines.values())),
        Row.told("lines of the longest file", max(lines.values())),
        Row.told("lines of a function, median", statistics.median(lengths)),
        Row.told("lines of a function, 90 % have at most", lengths[int(0.9 * len(lengths))]),
        Row.told("lines of the longest function", lengths[-1]),
        Row.told("comments in a hundred lines", 100 * said / sum(lines.values())),
    ]


def main() -> int:
    """Print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    return finish(rows_of(), title="The house", json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
