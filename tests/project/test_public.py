"""What others rely on: options, exported names, and who needs torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from prismscale.cli import all_commands
from support.runs import environment

SOURCE = Path(__file__).parents[2] / "src" / "prismscale"
RUN_OPTIONS = [
    *("--assert", "--attach", "--capture", "--capture-timeout"),
    *("--check", "--clock", "--cluster", "--compute-scale"),
    *("--device", "--for-steps", "--fresh", "--fused"),
    *("--hang", "--json", "--kernels", "--live"),
    *("--markdown", "--max-captures", "--memory", "--netns"),
    *("--no-memory", "--out", "--payload", "--price"),
    *("--quick", "--record", "--record-limit", "--routing", "--rules"),
    *("--samples", "--show", "--slots", "--slow"),
    *("--stand-in", "--step-marker", "--steps", "--storage"),
    *("--tokens-per-step", "--transfers", "--trust-objects", "--values", "--variability"),
    *("--watch-steps", "--what-if", "--world-size", "-m"),
]
TORCHLESS = [
    *("analysis", "cluster", "cost", "durations", "errors", "files", "forecast", "formats"),
    "graph",
    *("report", "runfolder", "sim"),
]


def test_the_options_of_run_stay_what_they_are() -> None:
    """Taking one away or renaming it breaks somebody's script: change this list knowingly."""
    options = (o for p in all_commands()["run"].params for o in p.opts if o.startswith("-"))
    assert sorted(options) == RUN_OPTIONS


def test_every_command_says_what_it_does() -> None:
    """One line in the list of commands."""
    commands = all_commands()
    assert "run" in commands
    assert all(c.get_short_help_str() for c in commands.values())


def test_exported_names_are_sorted() -> None:
    """Where a module lists what it exports."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names = ast.literal_eval(node.value)
                assert names == sorted(names, key=_constants_first), path


def _constants_first(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_simulation_imports_no_torch() -> None:
    """Graphs, simulation, forecasts and reports run where torch is not installed."""
    imports = f"""
import importlib, pkgutil
for name in {TORCHLESS}:
    module = importlib.import_module(f"prismscale.{{name}}")
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)
"""
    assert not _imports_torch(imports)


def test_the_command_line_itself_needs_no_torch() -> None:
    """It answers before a rank's process would have started."""
    assert not _imports_torch("import prismscale.cli")


@pytest.mark.parametrize("module", ["commands.run", "commands.explore", "job"])
def test_a_job_itself_needs_no_torch(module: str) -> None:
    """Its ranks import it, in processes that are forked from one another."""
    assert not _imports_torch(f"import prismscale.{module}")


def _imports_torch(code: str) -> bool:
    """Whether a fresh interpreter has imported torch after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code + "\nimport sys; print('torch' in sys.modules)"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1] == "True"
