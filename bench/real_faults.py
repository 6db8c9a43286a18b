"""Faults in runs with real values: a clear error, nothing left behind, and the next run completes.

    python bench/real_faults.py [--part PART]… [--json PATH]

Each fault befalls a job of four ranks twenty times, in other moments and places: a rank is killed
while it is suspended; the disk of the run folder is full (needs root: it is a small file system);
the command, which coordinates the ranks, is killed; a byte changes in what ranks say to each other,
and in a recording that a live rank hears. After each, processes, shared memory, values under way
and half-written files are counted, and the same run is made again without the fault: its ranks must
hear what those of an undisturbed one hear. ``programs/injured.py`` is the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pyarrow as pa

import tests_on_path  # noqa: F401
from parts import Part, run_parts
from prismscale.api import perform
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from prismscale.errors import FormatError, PrismscaleError, ScriptError, StorageError
from prismscale.job_parts import fork_server
from prismscale.payload.recordings.recording_writer import RESULT
from prismscale.processes.starter import Spawner, Starter
from prismscale.validation.rows import Row
from runs import HERE
from support.runs import MARK, command, environment, left_running

TIMES = 20
PATIENCE_S = 10.0
RANKS = 4
STEPS = 9
NUMEL = 4096
"""Of the sums of the job."""
PROGRAM = HERE / "programs" / "injured.py"
MARKER = "injured_marker:step_ends"


@dataclass(kw_only=True)
class Seen:
    """What went wrong in any of the injections."""

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "without its error",
                "processes left",
                "shared memory left",
                "values or half-written files left",
                "runs after it that failed or heard other values",
            ),
            0,
        )
    )

    def note(self, what: str, *, wrong: object, why: str = "") -> None:
        """One look."""
        if wrong:
            self.counts[what] += 1
            print(f"{what}: {why or wrong}", file=sys.stderr, flush=True)

    def rows(self) -> list[Row]:
        """None may be."""
        return [Row.at_most(f"{TIMES} times, {what}", n, 0) for what, n in self.counts.items()]


@dataclass(frozen=True, kw_only=True)
class Patient:
    """The job in a folder of its own."""

    folder: Path
    starter: Starter
    expected: list[str]
    """What its ranks hear, undisturbed."""

    @property
    def config(self) -> JobConfig:
        """All ranks in one slot: whoever does not run is suspended."""
        return JobConfig(
            script=Script(target=str(PROGRAM), args=(str(self.folder),)),
            world_size=RANKS,
            cluster="loopback-gloo",
            out=self.folder / "run",
            values="real",
            slots=1,
            samples=STEPS - 2,
            memory=False,
            step_marker=MARKER,
            record=("all",),
            clock="virtual",
            steps=3,
        )

    def injure(self, **fault: object) -> None:
        """Let it happen in the next run."""
        (self.folder / "fault.json").write_text(json.dumps(fault))

    def heals(self) -> None:
        """No fault any more."""
        (self.folder / "fault.json").unlink(missing_ok=True)

    def heard(self) -> list[str]:
        """What all ranks noted."""
        paths = (self.folder / f"heard-{rank}.jsonl" for rank in range(RANKS))
        return [path.read_text() if path.exists() else "" for path in paths]

    def attempt(self, **changes: object) -> PrismscaleError | None:
        """Make the run; the error that it ends with."""
        try:
            perform(replace(self.config, **changes), starter=self.starter)  # type: ignore[arg-type]
        except PrismscaleError as error:
            return error
        return None

    def look(self, seen: Seen, mark: str) -> None:
        """Count what is left behind."""
        seen.note("processes left", wrong=_left(mark))
        shared = Path("/dev/shm").glob(f"prismscale-{os.getpid()}-*")
        seen.note("shared memory left", wrong=[*shared])
        left = [*self.folder.rglob("*.part"), *self.folder.glob("run/captures/*/values")]
        seen.note("values or half-written files left", wrong=left)

    def resume(self, seen: Seen) -> None:
        """Make the run again, which must complete."""
        self.heals()
        error = self.attempt()
        wrong = error or self.heard() != self.expected
        seen.note("runs after it that failed or heard other values", wrong=wrong, why=str(error))


@contextlib.contextmanager
def patients(folder: Path, name: str) -> Iterator[tuple[Callable[[int], Patient], str]]:
    """Makes jobs by number, and the mark of all their processes."""
    mark = uuid.uuid4().hex
    first = folder / name / "first"
    first.mkdir(parents=True)
    made = Patient(folder=first, starter=Spawner(), expected=[])
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {MARK: mark}))
        starter = stack.enter_context(fork_server(made.config, folder / name / "logs"))
        well = replace(made, starter=starter)
        if error := well.attempt():
            raise SystemExit(f"undisturbed: {error}")
        expected = well.heard()

        def make(number: int) -> Patient:
            own = folder / name / str(number)
            own.mkdir()
            return Patient(folder=own, starter=starter, expected=expected)

        yield make, mark


def injured(
    folder: Path, name: str, injure: Callable[[Patient, int], Callable[[object], bool]]
) -> list[Row]:
    """A fault that the job brings about itself: ``injure`` orders the one of a number, and returns
    what tells whether an error is the clear one."""
    seen = Seen()
    with patients(folder, name) as (make, mark):
        for number in range(TIMES):
            patient = make(number)
            is_clear = injure(patient, number)
            error = patient.attempt()
            seen.note("without its error", wrong=not is_clear(error), why=repr(error))
            patient.look(seen, mark)
            patient.resume(seen)
            shutil.rmtree(patient.folder)
    return seen.rows()


def killed_ranks(folder: Path) -> list[Row]:
    """A rank dies while it is suspended."""

    def kill(patient: Patient, number: int) -> Callable[[object], bool]:
        rank, step = 1 + number % (RANKS - 1), 1 + number // (RANKS - 1)
        patient.injure(kind="kill", rank=rank, step=step)
        told = f"rank {rank} was ended"
        return lambda error: isinstance(error, ScriptError) and told in str(error)

    return injured(folder, "ranks", kill)


def full_disks(folder: Path) -> list[Row]:
    """Disks of other sizes, which end in other moments of the run."""
    seen, filled = Seen(), 0
    with patients(folder, "disks") as (make, mark):
        for number in range(TIMES):
            patient = make(number)
            out = patient.folder / "run"
            out.mkdir()
            size = f"size={24 + 24 * number}k"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(out)], check=True)
            try:
                error = patient.attempt()
                filled += error is not None
                clear = error is None or isinstance(error, StorageError) or "space" in str(error)
                seen.note("without its error", wrong=not clear, why=repr(error))
                patient.look(seen, mark)
                subprocess.run(["mount", "-o", "remount,size=256m", str(out)], check=True)
                patient.resume(seen)
            finally:
                subprocess.run(["umount", str(out)], check=True)
            shutil.rmtree(patient.folder)
    return [Row.told("disks that were full, of as many", filled), *seen.rows()]


def killed_commands(folder: Path) -> list[Row]:
    """SIGKILL, spread over the whole run of the ranks."""
    seen, clock = Seen(), random.Random(0)
    with patients(folder, "commands") as (make, mark):
        began = time.monotonic()
        make(-1).attempt()
        whole_s = time.monotonic() - began
        for number in range(TIMES):
            patient = make(number)
            own = f"{mark}-{number}"
            run = subprocess.Popen(
                _words(patient.config), env=environment(own), stderr=subprocess.DEVNULL
            )
            while not [*patient.folder.glob("run/captures/*/values")] and run.poll() is None:
                time.sleep(0.01)
            time.sleep(whole_s * (number + clock.random()) / TIMES)
            run.send_signal(signal.SIGKILL)
            run.wait()
            seen.note("processes left", wrong=left_running(own))
            # Whoever ends a killed run's ranks removes what they said, a moment later.
            time.sleep(0.5)
            left = [*patient.folder.glob("run/captures/*/values")]
            seen.note("values or half-written files left", wrong=left)
            patient.resume(seen)
            shutil.rmtree(patient.folder)
    del seen.counts["without its error"]
    return seen.rows()


def _words(config: JobConfig) -> list[str]:
    options = ("--world-size", RANKS, "--cluster", config.cluster, "--out", config.out)
    real = ("--values", "real", "--slots", 1, "--samples", config.samples, "--record", "all")
    rest = ("--no-memory", "--clock", "virtual", "--steps", 3, "--step-marker", MARKER)
    return command("run", *options, *real, *rest, PROGRAM, *config.script.args)


def changed_values(folder: Path) -> list[Row]:
    """A byte of what one rank has said and the others have not heard."""

    def flip(patient: Patient, number: int) -> Callable[[object], bool]:
        run = str(patient.folder / "run")
        patient.injure(kind="flip", step=1 + number % 6, byte=1 + 37 * number, run=run)
        return lambda error: isinstance(error, FormatError) and "does not hold" in str(error)

    return injured(folder, "values", flip)


def changed_recordings(folder: Path) -> list[Row]:
    """A byte of a recording, before a live rank hears it; the next run has it as it was."""
    seen = Seen()
    with patients(folder, "recordings") as (make, mark):
        patient = make(0)
        if error := patient.attempt(live=(1,)):
            raise SystemExit(f"undisturbed, live: {error}")
        heard = _heard_blobs(patient.folder)
        for number in range(TIMES):
            shutil.rmtree(patient.folder / "run" / "live")
            path = heard[number % len(heard)]
            before = path.read_bytes()
            changed = bytearray(before)
            changed[number * 811 % len(before)] ^= 0x10
            path.write_bytes(changed)
            error = patient.attempt(live=(1,))
            clear = isinstance(error, FormatError) and "damaged" in str(error)
            seen.note("without its error", wrong=not clear, why=repr(error))
            patient.look(seen, mark)
            path.write_bytes(before)
            error = patient.attempt(live=(1,))
            seen.note("runs after it that failed or heard other values", wrong=error)
    return seen.rows()


def _left(mark: str) -> list[int]:
    """Processes of a run that has ended, beside the server whose forks ranks are, and which all
    runs share."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        members = [p for p in psutil.process_iter() if _is_marked(p, mark)]
        left = [p.pid for p in members if p.ppid() != os.getpid()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        running = process.status() != psutil.STATUS_ZOMBIE
        return running and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _heard_blobs(folder: Path) -> list[Path]:
    """What live rank 1 needs of the sums of the first steps: what they came to, and its part."""
    (recorded,) = folder.glob("run/captures/*/recorded")
    rows = []
    for index in recorded.glob("index-*.arrow"):
        with pa.OSFile(str(index), "rb") as file, pa.ipc.open_file(file) as reader:
            rows += reader.read_all().to_pylist()
    needed = [row for row in rows if row["member"] in (RESULT, 1)]
    told = [json.loads(row["tensors"]) for row in sorted(needed, key=lambda row: row["at_ns"])]
    digests = [digest for tensors in told for _, shape, digest in tensors if shape == [NUMEL]]
    return [recorded / "blobs" / d[:2] / d[2:] for d in digests[:6]]


PARTS: dict[str, Part] = {
    "a rank is killed while suspended": killed_ranks,
    "the disk is full": full_disks,
    "the command is killed": killed_commands,
    "a value under way is damaged": changed_values,
    "a recording is damaged": changed_recordings,
}


if __name__ == "__main__":
    sys.exit(run_parts(PARTS, title="Faults in runs with real values", doc=__doc__))
