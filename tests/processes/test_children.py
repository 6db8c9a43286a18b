"""Child processes: watched, logged, and ended as a whole, whatever happens to us."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from prismscale.errors import StorageError
from prismscale.processes.children import Children, log_tail
from prismscale.processes.reaper import guard
from support.runs import eventually, runs

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]


def test_a_child_that_ended_is_reported_once(tmp_path: Path) -> None:
    """With its exit code and the end of what it printed."""
    program = "for i in range(20): print('line', i)\nraise SystemExit(4)"
    with Children() as children:
        child = children.start("a", [sys.executable, "-c", program], tmp_path / "logs" / "a.log")
        assert eventually(lambda: children.finished() == [child])
        assert children.finished() == []
        assert children.running == 0
    assert child.process.returncode == 4
    assert child.log_tail(2) == "line 18\nline 19"


def test_the_end_of_a_long_log_is_read_alone(tmp_path: Path) -> None:
    """A program may print without end."""
    log = tmp_path / "log"
    log.write_bytes(b"x" * (1 << 20) + b"\nlast but one\nlast\n")
    assert log_tail(log, 2) == "last but one\nlast"
    assert len(log_tail(log, 3)) < 1 << 17


def test_leaving_the_context_ends_everybody(tmp_path: Path) -> None:
    """Also after an error."""
    with suppress(KeyboardInterrupt), Children() as children:
        child = children.start("a", SLEEP, tmp_path / "a.log")
        raise KeyboardInterrupt
    assert not runs(child.process.pid)


def test_grandchildren_end_with_their_session(tmp_path: Path) -> None:
    """Even where the child itself has ended long ago."""
    program = f"import subprocess; print(subprocess.Popen({SLEEP!r}).pid, flush=True)"
    with Children() as children:
        child = children.start("a", [sys.executable, "-c", program], tmp_path / "a.log")
        assert eventually(lambda: children.finished() == [child])
        assert eventually(lambda: not runs(int(child.log_tail())))


def test_a_child_that_ignores_the_request_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a grace period."""
    monkeypatch.setattr("prismscale.processes.children.GRACE_S", 0.05)
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    with Children() as children:
        command = [sys.executable, "-c", program + "time.sleep(300)"]
        child = children.start("a", command, tmp_path / "a.log")
        assert eventually(lambda: child.log_tail() == "1")
    assert child.process.returncode == -9


def test_shared_memory_goes_with_the_processes() -> None:
    """The folder is private, and gone afterwards with all that is in it."""
    with Children() as children:
        folder = children.shared_folder()
        (folder / "tensor").write_bytes(b"x")
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_an_owner_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """No child, no grandchild, no shared memory."""
    code = f"""
import pathlib, time
from prismscale.processes.children import Children
with Children() as children:
    child = children.start("a", {SLEEP!r}, pathlib.Path({str(tmp_path / "a.log")!r}))
    print(child.process.pid, children.shared_folder(), flush=True)
    time.sleep(300)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not runs(int(pid)) and not Path(folder).exists())


def test_the_reaper_ends_only_what_is_still_listed(tmp_path: Path) -> None:
    """A folder that was taken off the list stays."""
    kept, left = tmp_path / "kept", tmp_path / "left behind"
    kept.mkdir()
    left.mkdir()
    text = f"+folder {kept}\n+folder {left}\n+session 999999999\n-folder {kept}\n"
    guard(io.BytesIO(text.encode()), os.getpid())
    assert kept.exists()
    assert not left.exists()


@pytest.mark.parametrize("left", ["open('/dev/null')", "None", "object()"])
def test_a_program_may_leave_any_standard_output(left: str) -> None:
    """Closed, none, or without ``flush``: its end is no failure, and its error is kept."""
    code = (
        "import sys; from prismscale.processes.children import end_now; "
        f"sys.stdout = sys.stderr = {left}; getattr(sys.stdout, 'close', str)(); end_now(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Before anything is started."""
    (tmp_path / "logs").write_text("in the way")
    with Children() as children, pytest.raises(StorageError, match=r"logs.a\.log"):
        children.start("a", SLEEP, tmp_path / "logs" / "a.log")
