"""Sweeps that are ended in the middle: nobody is left, and a second command goes on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.explored_program import NULL, by_label, write_explored
from support.runs import command, environment, left_running, prismscale

Limit = Callable[[], None]
VARY = ("--vary", "--tp {1,2}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_explored(tmp_path / "program")


def sweep(out: Path, script: Path, *more: str) -> list[str]:
    """The command line of a sweep."""
    return command("explore", *NULL, "--out", out, *VARY, *more, "--", script)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_sweep_that_is_ended_leaves_nobody_and_goes_on(
    script: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The ranks, their points and what these were forked from go; points that were finished are
    kept."""
    out, mark = tmp_path / "out", uuid.uuid4().hex
    first = command("explore", *NULL, "--out", out, "--vary", "--tp {1}", "--", script)
    assert prismscale(*first[3:]).code == 0
    run = subprocess.Popen(
        sweep(out, script, "--vary", "{--endless}"),
        env=environment(mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not _endless(out):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    run.send_signal(number)
    _, said = run.communicate(timeout=120)
    assert run.returncode == code
    assert "Traceback" not in said
    assert left_running(mark) == []
    kept = {p: p.stat().st_mtime_ns for p in out.glob("points/*.json")}
    assert prismscale(*sweep(out, script)[3:]).code == 0
    assert {row["status"] for row in by_label(out).values()} == {"done"}
    assert all(p.stat().st_mtime_ns == at for p, at in kept.items())


def _endless(out: Path) -> bool:
    logs = out.glob("points/*endless*/logs/capture-rank-*.log")
    return any("endless" in log.read_text(errors="replace") for log in logs)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, Limit]]:
    """A folder in which not every point has room: a small file system for root, a limit on the size
    of files for others."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    )

    def limit() -> None:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    yield folder, limit
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_a_sweep_that_goes_on_later(
    script: Path, full_disk: tuple[Path, Limit], tmp_path: Path
) -> None:
    """Exit code 7 and how far it came; with more room, the same command does the rest."""
    folder, limit = full_disk
    out = folder / "out"
    run = subprocess.run(
        sweep(out, script, "--workers", "1"),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert run.returncode == 7, run.stderr
    assert "of 2 points done; the same command goes on from there" in run.stderr
    assert "Traceback" not in run.stderr
    if folder.is_mount():
        subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
    assert prismscale(*sweep(out, script)[3:]).code == 0
    assert {row["status"] for row in by_label(out).values()} == {"done"}


def test_a_folder_in_use_is_refused(script: Path, tmp_path: Path) -> None:
    """By its lock, which goes with the process that holds it."""
    out = tmp_path / "out"
    run = subprocess.Popen(
        sweep(out, script, "--vary", "{--endless}"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (out / "points").is_dir():
            assert run.poll() is None
            time.sleep(0.05)
        done = prismscale(*sweep(out, script)[3:])
        assert done.code == 2
        assert "is in use by another sweep" in done.err
    finally:
        run.terminate()
        run.wait(60)
