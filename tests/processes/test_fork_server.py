"""Ranks that are forked from a process which has imported what they need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prismscale.errors import PrismscaleError
from prismscale.processes.children import Child, Children, Program
from prismscale.processes.fork_server import ForkServer
from support.runs import eventually, runs

PROGRAM = """
import os, subprocess, sys, time
def main(arguments):
    exec(arguments[0])
    return 0
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """One that has imported ``colorsys`` and may learn ``cmd``; its forks can import ``forked``."""
    (tmp_path / "forked.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    log = tmp_path / "server.log"
    with ForkServer(preload=["colorsys"], learn=["cmd", "no_such_module"], log=log) as server:
        yield server


def fork(server: ForkServer, children: Children, folder: Path, code: str) -> Child:
    """Run ``code`` in a fork."""
    program = Program(name="0", module="forked", arguments=(code,), log=folder / "0.log")
    return server.start(children, program)


def ended(server: ForkServer, folder: Path, code: str) -> Child:
    """A fork that ran ``code`` to its end."""
    with Children() as children:
        child = fork(server, children, folder, code)
        child.process.wait(60)
        assert children.finished() == [child]
    return child


def test_a_fork_has_its_own_exit_code_and_log(server: ForkServer, tmp_path: Path) -> None:
    """As a process that was started anew."""
    child = ended(server, tmp_path, "print('out'); sys.exit(4)")
    assert child.process.returncode == 4
    assert child.log_tail() == "out"


def test_what_is_preloaded_is_there(server: ForkServer, tmp_path: Path) -> None:
    """Before the fork's first line."""
    child = ended(server, tmp_path, "print('colorsys' in sys.modules, sys.argv[1:] == arguments)")
    assert child.log_tail() == "True True"


def test_what_one_fork_imported_is_there_for_the_next(server: ForkServer, tmp_path: Path) -> None:
    """Of what may be learned; the first one pays for it."""
    code = "print('cmd' in sys.modules, 'calendar' in sys.modules); import cmd, calendar"
    assert ended(server, tmp_path, code).log_tail() == "False False"
    assert ended(server, tmp_path, code).log_tail() == "True False"


def test_a_module_of_the_programs_own_is_not_learned(server: ForkServer, tmp_path: Path) -> None:
    """It only has the name of one that may be."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "cmd.py").touch()
    own = f"sys.path.insert(0, {str(tmp_path / 'own')!r}); import cmd; print(cmd.__file__)"
    assert ended(server, tmp_path, own).log_tail() == str(tmp_path / "own" / "cmd.py")
    assert ended(server, tmp_path, "print('cmd' in sys.modules)").log_tail() == "False"


def test_a_fork_leads_its_session(server: ForkServer, tmp_path: Path) -> None:
    """So that all it starts can be ended with it."""
    child = ended(server, tmp_path, "print(os.getsid(0) == os.getpid())")
    assert child.log_tail() == "True"


def test_a_killed_fork_shows_its_signal(server: ForkServer, tmp_path: Path) -> None:
    """As a negative exit code."""
    with Children() as children:
        child = fork(server, children, tmp_path, "time.sleep(300)")
        os.kill(child.process.pid, signal.SIGKILL)
        assert child.process.wait(60) == -signal.SIGKILL


def test_waiting_too_long_for_a_fork_says_so(server: ForkServer, tmp_path: Path) -> None:
    """And leaves it running."""
    with Children() as children:
        child = fork(server, children, tmp_path, "time.sleep(300)")
        with pytest.raises(subprocess.TimeoutExpired):
            child.process.wait(0.01)
        assert child.process.poll() is None


def test_forks_end_with_their_server(server: ForkServer, tmp_path: Path) -> None:
    """Even those that ignore requests; they count as ended by the server's end."""
    code = "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(300)"
    with Children() as children:
        child = fork(server, children, tmp_path, code)
        server.__exit__(None, None, None)
        assert eventually(lambda: not runs(child.process.pid))
        assert child.process.wait(60) == -signal.SIGTERM


def test_a_killed_server_is_named_once(server: ForkServer, tmp_path: Path) -> None:
    """Not its forks, which end in the clean-up; that is not told again."""
    with Children() as children:
        child = fork(server, children, tmp_path, "time.sleep(300)")
        os.kill(psutil.Process(child.process.pid).ppid(), signal.SIGKILL)
        with pytest.raises(PrismscaleError, match="starts ranks was ended by signal 9"):
            child.process.wait(60)
        assert child.process.poll() == -signal.SIGTERM
    assert eventually(lambda: not runs(child.process.pid))


def test_a_server_that_cannot_import_says_what(tmp_path: Path) -> None:
    """From its log."""
    with (
        ForkServer(preload=["no_such_module"], log=tmp_path / "server.log") as server,
        Children() as children,
        pytest.raises(PrismscaleError, match="No module named 'no_such_module'"),
    ):
        fork(server, children, tmp_path, "pass")


def test_an_owner_that_is_killed_leaves_no_fork(server: ForkServer, tmp_path: Path) -> None:
    """The server notices."""
    code = f"""
import pathlib, time
from prismscale.processes.fork_server import ForkServer
from prismscale.processes.children import Children, Program
folder = pathlib.Path({str(tmp_path)!r})
with ForkServer(preload=[], log=folder / "other.log") as server, Children() as children:
    code = ("time.sleep(300)",)
    program = Program(name="0", module="forked", arguments=code, log=folder / "1.log")
    child = server.start(children, program)
    print(child.process.pid, flush=True)
    time.sleep(300)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not runs(pid))
