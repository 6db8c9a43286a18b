"""Kills, disks and clocks: what a bad day does to every command, and to the next one.

    python bench/bad_days.py [--part NAME]… [--times N] [--seed N] [--json PATH]

A part is a command under a fault: ``run`` under ``kill`` is ``run, kill``. Each command first runs
undisturbed; then N times under the fault, each time in a new folder, and after each once more
undisturbed in the same folder. Counted is what must not be:

- *left running*: a process of the command, 20 s after it ended;
- *half-written*: a JSON file that cannot be read, or, but for SIGKILL, a part of a file;
- *wrong exit code*: a traceback, or a code that does not fit the fault;
- *not the same again*: the command afterwards fails, says something else, or makes a finished
  capture again.

Faults: ``kill`` sends SIGINT, SIGTERM or SIGKILL at a moment of its own; ``disk`` is a file system
with too little room (needs root); ``read-only`` one that takes nothing (needs root); ``home``
leaves HOME out, or names one that is not there; ``files`` allows 64 open files; ``clock`` sets the
clock hours to and fro meanwhile (needs a C++ compiler). Rows of further seeds are added to those in
PATH, so that a long measurement can be made in pieces.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import tests_on_path  # noqa: F401
from bad_day_rows import COUNTED, rows_with
from prismscale.validation.rows import finish, read_rows, write_rows
from support.explored_program import NULL, write_explored
from support.runs import command, environment, left_running

OWN_CODES = range(1, 9)
"""Of errors in words."""
CLOCK_SOURCE = Path(__file__).with_name("jumping_clock.cpp")
LONGEST_S = 600
_SECONDS = struct.Struct("q")
OPEN_FILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What is disturbed."""

    words: tuple[object, ...]
    """OUT and SCRIPT stand for the folder for its output, and for the program."""
    said: Callable[[Path], object]
    """What it found, read from its output: alike each time."""
    made_from: str = ""
    """The command whose output must be there before."""

    def of(self, out: Path, script: Path) -> list[str]:
        """Its command line."""
        here = {"OUT": out, "OUT/fit.json": out / "fit.json", "SCRIPT": script}
        return command(*(here.get(str(word), word) for word in self.words))


def _member(file: str, *path: str | int) -> Callable[[Path], object]:
    def read(out: Path) -> object:
        found = json.loads((out / file).read_text())
        for key in path:
            found = found[key]
        return found

    return read


def _points(out: Path) -> object:
    points = json.loads((out / "explore.json").read_text())["points"]
    return sorted((p["arguments"], p["status"], p["step_ns"]) for p in points)


EXPLORE = ("explore", *NULL, "--vary", "--tp {1,2}", "--out", "OUT")
COMMANDS = {
    "run": Command(
        words=("run", *NULL, "--out", "OUT", "SCRIPT"), said=_member("results.json", "step_ns")
    ),
    "fit": Command(
        words=("fit", *NULL[2:4], "--out", "OUT", "--json", "OUT/fit.json", "SCRIPT"),
        said=_member("fit.json", "variants", 0, "fit"),
    ),
    "forecast": Command(
        words=("forecast", "OUT"), said=_member("results.json", "forecast"), made_from="run"
    ),
    "explore": Command(words=(*EXPLORE, "SCRIPT"), said=_points),
    "explore on Ray": Command(words=(*EXPLORE, "--executor", "ray", "SCRIPT"), said=_points),
}


@dataclass(kw_only=True)
class Day:
    """One command on one day."""

    chosen: Command
    out: Path
    script: Path
    rng: random.Random
    whole_s: float
    """That the command takes undisturbed."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, **more: object) -> subprocess.Popen[str]:
        """The command, without waiting for it."""
        return subprocess.Popen(
            self.chosen.of(self.out, self.script),
            env={**environment(self.mark), **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            **more,  # type: ignore[call-overload]
        )

    def ended(self, run: subprocess.Popen[str]) -> tuple[int, str]:
        """Exit code and what it said; a command that hangs is killed and has code None's."""
        try:
            _, said = run.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            run.kill()
            return -1, f"did not end within {LONGEST_S} s"
        return run.returncode, said


Fault = Callable[[Day], tuple[int, str, set[int]]]
"""Runs the command under the fault: its exit code, what it said, and codes that fit."""


def kill(day: Day) -> tuple[int, str, set[int]]:
    """At some moment."""
    number = day.rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
    run = day.start()
    time.sleep(day.whole_s * day.rng.random())
    run.send_signal(number)
    # Ended before it could take notice, or after all was done.
    return *day.ended(run), {0, -number, 128 + number}


def disk(day: Day) -> tuple[int, str, set[int]]:
    """A disk with room for some of it: at most what it wrote undisturbed."""
    with _mounted(day.out, f"size={day.rng.randrange(4, 400)}k"):
        return *day.ended(day.start()), {0, *OWN_CODES}


def read_only(day: Day) -> tuple[int, str, set[int]]:
    """A disk that takes nothing."""
    with _mounted(day.out, "ro"):
        return *day.ended(day.start()), set(OWN_CODES)


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    """What the folder holds lies on a disk of its own, and is brought back afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    before = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, before, symlinks=True)
    size = "" if options == "ro" else f",{options}"
    held = sum(p.stat().st_size for p in before.rglob("*") if p.is_file()) // 1024 + 64
    size = f",size={held + int(options[5:-1])}k" if size else ""
    subprocess.run(["mount", "-t", "tmpfs", f"-onr_inodes=0{size}", "none", folder], check=True)
    try:
        shutil.copytree(before, folder, symlinks=True, dirs_exist_ok=True)
        if options == "ro":
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield
        shutil.rmtree(before)
        shutil.copytree(folder, before, symlinks=True)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        shutil.copytree(before, folder, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(before)


def home(day: Day) -> tuple[int, str, set[int]]:
    """None, or one that is not there."""
    day.environment = {"HOME": day.rng.choice(("", "/nonexistent/home")), "XDG_CACHE_HOME": ""}
    return *day.ended(day.start()), {0}


def files(day: Day) -> tuple[int, str, set[int]]:
    """Few of them open at a time."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))

    return *day.ended(day.start(preexec_fn=limited)), {0, *OWN_CODES}


def clock(day: Day) -> tuple[int, str, set[int]]:
    """The time of day jumps by up to a day, some times over; the steady clock goes on."""
    told = day.out.with_name(f"{day.out.name}-clock")
    told.write_bytes(_SECONDS.pack(0))
    day.environment = {"LD_PRELOAD": str(_clock_library()), "JUMPING_CLOCK_FILE": str(told)}
    run = day.start()
    # The same file all the time: the library has it mapped.
    with told.open("r+b", buffering=0) as offset:
        while run.poll() is None:
            time.sleep(day.whole_s * day.rng.random() / 4)
            offset.seek(0)
            offset.write(_SECONDS.pack(day.rng.randrange(-86_400, 86_400)))
    told.unlink()
    return *day.ended(run), {0}


@cache
def _clock_library() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="jumping-clock-"))
    atexit.register(shutil.rmtree, folder)
    library = folder / "libjumping_clock.so"
    flags = ("-O1", "-shared", "-fPIC", "-o", library, CLOCK_SOURCE, "-ldl")
    subprocess.run(["c++", *map(str, flags)], check=True)
    return library


FAULTS: dict[str, Fault] = {
    "kill": kill,
    "disk": disk,
    "read-only": read_only,
    "home": home,
    "files": files,
    "clock": clock,
}


def undisturbed(day: Day) -> float:
    """Run the command, which must go well; returns how many seconds it took."""
    began = time.monotonic()
    code, said = day.ended(day.start())
    if code:
        raise SystemExit(f"undisturbed, exit code {code}:\n{said}")
    return time.monotonic() - began


def part(name: str, times: int, seed: int, folder: Path) -> Counter[str]:
    """How often what must not be was, in ``times`` faults."""
    command_name, _, fault_name = name.partition(", ")
    chosen, fault = COMMANDS[command_name], FAULTS[fault_name]
    script = write_explored(folder / "program")
    rng = random.Random(f"{name}/{seed}")
    first = folder / "undisturbed"
    if chosen.made_from:
        before = COMMANDS[chosen.made_from]
        undisturbed(Day(chosen=before, out=first, script=script, rng=rng, whole_s=0))
        shutil.copytree(first, folder / "made")
    whole_s = undisturbed(Day(chosen=chosen, out=first, script=script, rng=rng, whole_s=0))
    seen: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    for n in range(times):
        out = folder / f"{n}"
        if chosen.made_from:
            shutil.copytree(folder / "made", out)
        day = Day(chosen=chosen, out=out, script=script, rng=rng, whole_s=whole_s)
        _count(day, fault, first, f"{name}, seed {seed}, time {n}", seen)
        shutil.rmtree(out)
    return seen


def _count(day: Day, fault: Fault, first: Path, name: str, seen: Counter[str]) -> None:
    code, said, good = fault(day)
    found = []
    if code not in good or "Traceback" in said:
        found.append(("wrong exit code", f"{code}: {said[-1500:]}"))
    found += [("left running", line) for line in left_running(day.mark)]
    is_killed = code == -signal.SIGKILL
    found += [("half-written", str(path)) for path in _half_written(day.out, is_killed)]
    # What is whole is not made again.
    whole = {path: path.stat().st_mtime_ns for path in day.out.glob("captures/*/rank-*.parquet")}
    day.environment = {}
    code, said = day.ended(day.start())
    if code or day.chosen.said(day.out) != day.chosen.said(first):
        found.append(("not the same again", f"{code}: {said[-1500:]}"))
    again = [path for path, at in whole.items() if not _is_as_of(path, at)]
    found += [("not the same again", f"made again: {path}") for path in again]
    for what, detail in found:
        print(f"{name}: {what}: {detail}", flush=True)
    seen.update(what for what in dict(found))


def _is_as_of(path: Path, at: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns == at


def _half_written(out: Path, is_killed: bool) -> Iterator[Path]:
    if not is_killed:
        yield from out.rglob(".*.part")
    for path in out.rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            yield path


def main() -> int:
    """Run the parts, print the table, and write it where asked; returns the exit code."""
    names = [f"{name}, {fault}" for name in COMMANDS for fault in FAULTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=names, help="all by default")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = read_rows(asked.json)
    for name in asked.part or names:
        with tempfile.TemporaryDirectory(prefix="bad-day-") as folder:
            seen = part(name, asked.times, asked.seed, Path(folder))
        rows = rows_with(rows, name, asked.seed, asked.times, seen)
        if asked.json:
            write_rows(rows, asked.json)
    return finish(rows, title="Bad days", json_path=asked.json)


if __name__ == "__main__":
    sys.exit(main())
