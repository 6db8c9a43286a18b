"""Runs every test file here in a process of its own: the null device changes its whole process.

The pytest that collects the tests never activates the device. When it comes to the first test of a
file it lets a child pytest run that file's selected tests, and reports the child's results as its
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

_CHILD = "PRISMSCALE_NULL_TEST_CHILD"


@pytest.fixture(scope="module")
def held() -> list[int]:
    """By how many bytes memory grew that torch's allocator never sees."""
    # In the child alone: to import it changes the process.
    from prismscale.devices.null import symmetric_memory

    changes: list[int] = []
    symmetric_memory.install(8, changes.append)
    return changes


@dataclass(frozen=True)
class _Result:
    """What the child says of a test; ``text`` is why it failed or was skipped."""

    outcome: Literal["passed", "failed", "skipped"]
    text: str = ""


_results: dict[Path, dict[str, _Result]] = {}
_PASSED = _Result("passed")


def _run_file(path: Path, items: list[pytest.Item]) -> dict[str, _Result]:
    """Results by test name."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        nodes = [f"{path}::{item.nodeid.split('::', 1)[1]}" for item in items]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        child = subprocess.run(
            [*command, f"--junitxml={report}", *nodes],
            env=os.environ | {_CHILD: "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            failed = _Result("failed", child.stdout + child.stderr)
            return dict.fromkeys((item.name for item in items), failed)
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {case.attrib["name"]: _result(case) for case in cases}


def _result(case: ElementTree.Element) -> _Result:
    if bad := [child for child in case if child.tag in ("failure", "error")]:
        return _Result("failed", "\n".join(c.text or c.attrib.get("message", "") for c in bad))
    skipped = case.find("skipped")
    return _PASSED if skipped is None else _Result("skipped", skipped.attrib.get("message", ""))


_Phase = Literal["setup", "call", "teardown"]


def _report(item: pytest.Item, when: _Phase, result: _Result) -> None:
    path, line, _ = item.location
    is_skipped = result.outcome == "skipped"  # which pytest wants with the place
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome=result.outcome,
        longrepr=(path, (line or 0) + 1, result.text) if is_skipped else result.text or None,
        when=when,
    )
    item.ihook.pytest_runtest_logreport(report=report)


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Report the child's result of ``item``; its fixtures are set up in the child only."""
    if os.environ.get(_CHILD):
        return None
    path = item.path
    if path not in _results:
        mine = [other for other in item.session.items if other.path == path]
        _results[path] = _run_file(path, mine)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    unknown = _Result("failed", "the child did not report this test")
    _report(item, "setup", _PASSED)
    _report(item, "call", _results[path].get(item.name, unknown))
    _report(item, "teardown", _PASSED)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session", autouse=True)
def null_device() -> None:
    """An active null H100 node, in the child only."""
    if os.environ.get(_CHILD):
        from prismscale.devices.null.gpus import device_spec
        from prismscale.devices.null.runtime import activate

        activate(device_spec("h100-sxm"))
