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
from pathlib import Path
from typing import Literal

import pytest

_CHILD = "PRISMSCALE_NULL_TEST_CHILD"
_results: dict[Path, dict[str, str | None]] = {}


def _run_file(path: Path, items: list[pytest.Item]) -> dict[str, str | None]:
    """Failure text, or None for a pass, by test name."""
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
            return dict.fromkeys((item.name for item in items), child.stdout + child.stderr)
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {case.attrib["name"]: _failure(case) for case in cases}


def _failure(case: ElementTree.Element) -> str | None:
    bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
    return "\n".join(child.text or child.attrib.get("message", "") for child in bad) or None


_Phase = Literal["setup", "call", "teardown"]


def _report(item: pytest.Item, when: _Phase, failure: str | None) -> None:
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="passed" if failure is None else "failed",
        longrepr=failure,
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
    _report(item, "setup", None)
    _report(item, "call", _results[path].get(item.name, "the child did not report this test"))
    _report(item, "teardown", None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session", autouse=True)
def null_device() -> None:
    """An active null H100 node, in the child only."""
    if os.environ.get(_CHILD):
        from prismscale.devices.null.gpus import device_spec
        from prismscale.devices.null.runtime import activate

        activate(device_spec("h100-sxm"))
