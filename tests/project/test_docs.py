"""The documentation: its links, its commands, and what it takes from the program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from prismscale.cli import COMMANDS, all_commands, app

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    ROOT / "tools" / "fit" / "README.md",
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def text_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What headings are linked to, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Commands in fenced blocks that are not quoted output, continued lines joined."""
    blocks = re.findall(r"^```\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        if line.split()[:1] and line.split()[0].strip("./") in KNOWN:
            yield shlex.split(line)


def parse(arguments: list[str]) -> None:
    """Let the command line take the arguments, without running anything."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "resolve_command"):
        context = command.make_context("prismscale", list(arguments))
        _, command, arguments = command.resolve_command(context, arguments)
    command.make_context("prismscale", list(arguments))


def check_prismscale(words: list[str]) -> None:
    parse(words[1:])
    check_paths(words)


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(words[1:]) <= targets


def check_paths(words: list[str]) -> None:
    scripts = [w for w in words if w.endswith(".py") or w.startswith("scripts/")]
    assert all((ROOT / s).is_file() for s in scripts)


KNOWN = {
    "prismscale": check_prismscale,
    "make": check_make,
    "python": check_paths,
    "torchrun": check_paths,
    "scripts/generate-docs": check_paths,
}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    """Every link leads to a file of the repository, and to a heading that is there."""
    for match in LINK.findall(text_of(page)):
        target, _, anchor = (match[0] or match[1]).partition("#")
        if target.startswith("http"):
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(there), f"{target} has no heading {anchor}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_ones_that_exist(page: Path) -> None:
    """Commands in code blocks parse, and the scripts and targets they name exist."""
    for words in shell_lines(page):
        KNOWN[words[0]](words)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_commands_exist(page: Path) -> None:
    """A `prismscale COMMAND` in running text is a command."""
    known = set(COMMANDS)
    named = re.findall(r"`prismscale\s+([a-z-]+)[^`]*`", text_of(page))

    assert set(named) <= known


def all_options() -> Iterator[tuple[str, Any]]:
    """``(command, parameter)`` of the whole command line."""
    waiting: list[tuple[str, Any]] = [(f"prismscale {n}", c) for n, c in all_commands().items()]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {n}", c) for n, c in getattr(command, "commands", {}).items()]
        yield from ((name, p) for p in command.params)


def test_every_option_is_documented() -> None:
    """Each option has a help text, and stands on the page of the command line."""
    page = (ROOT / "docs" / "command-line.md").read_text()
    for command, option in all_options():
        assert option.help, f"{command}: {option.name} has no help"
        for name in option.opts:
            assert not name.startswith("-") or f"`{name}" in page, f"{command} {name}"


def test_glossary_words_are_used() -> None:
    """A word of the glossary occurs on another page or in the package."""
    glossary = ROOT / "docs" / "glossary.md"
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", glossary.read_text(), flags=re.MULTILINE)
    sources = [*PAGES, *(ROOT / "src").rglob("*.py")]
    texts = (p.read_text().lower() for p in sources if p != glossary)
    everything = " ".join(" ".join(text.split()) for text in texts)

    assert [w for w in words if w not in everything] == []


def test_glossary_is_sorted() -> None:
    """The glossary is in alphabetical order."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", text, flags=re.MULTILINE)

    assert sorted(words) == words


def test_generated_text_is_up_to_date() -> None:
    """What the pages take from the program without running a job is what it says today."""
    command = [sys.executable, str(ROOT / "scripts" / "generate-docs"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_machine_paths(page: Path) -> None:
    """No page shows where somebody's clone or home lies."""
    assert not re.search(r"(?<![\w.])/(home|work|tmp|root|Users)/", page.read_text())


def test_the_python_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, beside the examples."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"^\d+\.\d ms \{'all ranks': \d+\}$", capsys.readouterr().out, re.MULTILINE)
