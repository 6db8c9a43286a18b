"""A process that splits into one that goes on and one that forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prismscale.processes.children import Children, Program
from prismscale.processes.fork_server import ForkServer
from support.runs import eventually, runs

SPLIT = """
import pathlib, sys
import colorsys
from prismscale.processes.children import Children, Program
from prismscale.processes.forked_server import split

folder = pathlib.Path(sys.argv[1])
server = split(folder / "server.log")
if isinstance(server, int):
    sys.exit(server)
with server, Children() as children:
    code = (sys.argv[2],)
    program = Program(name="0", module="forked", arguments=code, log=folder / "0.log")
    child = server.start(children, program)
    print(child.process.pid, flush=True)
    print(child.process.wait(60))
"""
FORKED = """
import os, sys, time
def main(arguments):
    exec(arguments[0])
    return 0
"""


def split_process(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that splits, and runs ``code`` in a fork of its other half."""
    (folder / "forked.py").write_text(FORKED)
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", SPLIT, str(folder), code],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_forks_find_what_the_process_had_imported(tmp_path: Path) -> None:
    """With a log, a session and an exit code of their own."""
    code = "print('colorsys' in sys.modules, os.getsid(0) == os.getpid()); sys.exit(4)"
    out, _ = split_process(tmp_path, code).communicate(timeout=60)
    assert out.splitlines()[1] == "4"
    assert (tmp_path / "0.log").read_text() == "True True\n"


def test_forks_end_with_the_process(tmp_path: Path) -> None:
    """However it ends."""
    owner = split_process(tmp_path, "time.sleep(300)")
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    assert eventually(lambda: not runs(pid))


def test_a_fork_that_splits_is_one_fork_to_its_server(tmp_path: Path) -> None:
    """Its other half ends by returning as well."""
    (tmp_path / "forked.py").write_text(FORKED)
    code = (
        "import pathlib; from prismscale.processes.forked_server import split\n"
        f"half = split(pathlib.Path({str(tmp_path / 'half.log')!r}))\n"
        "isinstance(half, int) or half.close(); import cmd"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    with (
        ForkServer(
            preload=(), learn=("cmd",), log=tmp_path / "log", environment=environment
        ) as server,
        Children() as children,
    ):
        for text in (code, "print('cmd' in sys.modules)"):
            program = Program(name="0", module="forked", arguments=(text,), log=tmp_path / "0.log")
            child = server.start(children, program)
            assert child.process.wait(60) == 0
    assert child.log_tail() == "True"


def test_what_forks_of_a_fork_import_is_there_for_the_next(tmp_path: Path) -> None:
    """A point of a sweep splits, and ranks of the next find what its own have imported."""
    (tmp_path / "forked.py").write_text(FORKED)
    rank = "print('cmd' in sys.modules); import cmd"
    point = f"""
import pathlib
from prismscale.processes.children import Children, Program
from prismscale.processes.forked_server import split
half = split(pathlib.Path({str(tmp_path / "half.log")!r}))
if not isinstance(half, int):
    with half, Children() as children:
        for log in ("a", "b"):
            log = pathlib.Path({str(tmp_path)!r}, log)
            rank = Program(name=log.name, module="forked", arguments=({rank!r},), log=log)
            half.start(children, rank).process.wait(60)
"""
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    log = tmp_path / "log"
    said = []
    with (
        ForkServer(preload=(), learn=("cmd",), log=log, environment=environment) as server,
        Children() as children,
    ):
        for _ in range(2):
            program = Program(name="0", module="forked", arguments=(point,), log=tmp_path / "0.log")
            assert server.start(children, program).process.wait(60) == 0
            said.append((tmp_path / "a").read_text())
    assert said == ["False\n", "True\n"]
