"""Captures ranks, each in its own process, as many side by side as the machine has cores."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.errors import (
    FormatError,
    UsageError,
)
from prismscale.graph.io import load_trace
from prismscale.graph.trace import RankTrace
from prismscale.processes.children import Child, Children, Program
from prismscale.processes.failure import failure_of, load_failure
from prismscale.processes.starter import Spawner, Starter, cores
from prismscale.progress import StageUpdate

POLL_S = 0.02
TIMED_POLL_S = 0.25
"""The same where ranks are timed on all cores, because each poll takes time from them."""
BALLAST = "ballast"


@dataclass(kw_only=True)
class CaptureRunner:
    """Runs captures and collects their traces; a trace that is already on disk is only read."""

    spec: CaptureSpec
    """Settings of the job; the rank is replaced for each capture."""
    logs: Path
    timeout_s: float = 1800.0
    jobs: int = field(default_factory=cores)
    progress: StageUpdate | None = None
    """Receives the number of captured ranks, and of those known to be needed."""
    starter: Starter = field(default_factory=Spawner)
    whole: frozenset[int] = frozenset()
    """Ranks that are watched as long as the first ones, whatever those did."""
    traces: dict[int, RankTrace] = field(default_factory=dict)
    after_first_message: Callable[[RankTrace], Sequence[int]] | None = None
    """Chooses further ranks to capture while rank 0 still runs.

    It gets a trace of rank 0's groups and its first send or receive. None: no further rank is
    chosen before rank 0 has ended."""
    _needed: int = 0
    _ballast: int = 0
    _slots: dict[int, Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.spec.device == "cuda":
            self.jobs = 1  # ranks that share a GPU would time each other

    def capture(self, ranks: Sequence[int]) -> None:
        """Capture ``ranks`` and add them to :attr:`traces`.

        Raises:
            ScriptError: the program failed on a rank; carries its traceback.
            UsageError: a rank did not finish in time.
        """
        self._needed += len(ranks)
        self._run(self._specs(ranks), self._add)

    def _specs(self, ranks: Sequence[int]) -> list[CaptureSpec]:
        spec = replace(self.spec, watched_steps=self._watched_steps())
        specs = [
            replace(
                spec,
                rank=rank,
                whole=rank in self.whole,
                tells_first_message=rank == 0 and self.after_first_message is not None,
            )
            for rank in ranks
        ]
        for each in specs:
            if each.whole:
                self._forget_first_steps(each)
        return specs

    def check(self, ranks: Sequence[int]) -> None:
        """Capture the first steps of ``ranks``: just enough to tell their programs apart.

        Raises:
            ScriptError, UsageError: as :meth:`capture`.
        """
        self._needed += len(ranks)
        spec = replace(self.spec, watched_steps=0, samples=1)
        self._run([replace(spec, rank=rank) for rank in ranks], self._add)

    def _forget_first_steps(self, spec: CaptureSpec) -> None:
        """Remove the trace of a rank that ended early in an earlier run but must now run on."""
        if spec.trace_path.exists() and (
            self._captured_before(spec.trace_path).facts.equivalent_to is not None
        ):
            spec.trace_path.unlink()

    def _watched_steps(self) -> int:
        """Return the number of steps in which the next ranks are watched for periodic events.

        The first ranks, the corners of the world, are always watched. The others are watched only
        if the first ones had unusual steps, or if some rank is to be compared step by step.
        """
        if self.whole:
            return self.spec.watched_steps
        if self.traces and not any(t.facts.unusual_steps for t in self.traces.values()):
            return 0
        return self.spec.watched_steps

    def capture_together(self, ranks: Sequence[int], *, marks: int) -> list[RankTrace]:
        """Capture ``ranks`` as a slice that really communicates; return their traces in order.

        Args:
            ranks: the slice, no more ranks than there are cores.
            marks: number of optimizer calls that each rank makes.

        Raises:
            ScriptError, UsageError: as :meth:`capture`.
        """
        out = Path(self.spec.out) / "slices" / "-".join(map(str, ranks))
        specs = [
            replace(
                self.spec,
                rank=rank,
                slice=tuple(ranks),
                marks=marks,
                track_memory=False,
                out=str(out),
            )
            for rank in ranks
        ]
        if not all(spec.trace_path.exists() for spec in specs):
            # A slice can only run as a whole, and must not find files of an interrupted run.
            shutil.rmtree(out, ignore_errors=True)
        traces: dict[int, RankTrace] = {}
        self._run(specs, lambda trace: traces.update({trace.rank: trace}))
        return [traces[rank] for rank in ranks]

    def _run(self, specs: Sequence[CaptureSpec], add: Callable[[RankTrace], None]) -> None:
        waiting = {str(spec.rank): spec for spec in specs}
        started: dict[str, CaptureSpec] = {}
        early: dict[str, Child] = {}
        last_end = 0.0
        with Children() as children:
            while waiting or early or children.running:
                if early and not waiting and not _ranks(children):
                    waiting, early = {name: started[name] for name in early}, {}
                while waiting and children.running < self.jobs:
                    name, spec = next(iter(waiting.items()))
                    if spec.trace_path.exists():
                        add(self._captured_before(spec.trace_path))
                    elif self.starter.has_room():
                        started[name] = spec
                        self._start(children, spec)
                    else:
                        break
                    del waiting[name]
                if self.spec.communication_load:
                    self._add_ballast(children)
                for spec in self._told_early({**started, **waiting}):
                    waiting[str(spec.rank)] = spec
                # One that failed may end together with the one that it was too early for.
                for child in sorted(children.finished(), key=lambda c: bool(c.process.returncode)):
                    if child.name == BALLAST:
                        continue
                    spec = started[child.name]
                    ran_beside = waiting or _ranks(children) or child.began < last_end
                    if ran_beside and _may_have_been_early(child, spec):
                        early[child.name] = child
                        continue
                    if child.process.returncode:
                        # The failure of the lowest rank may be the cause of the others' failures.
                        child = min([child, *early.values()], key=lambda one: int(one.name))
                    add(self._collect(child, started[child.name]))
                    last_end = time.monotonic()
                if not (waiting or early or _ranks(children)):
                    break
                self._refuse_slow(children)
                time.sleep(TIMED_POLL_S if self.spec.communication_load else POLL_S)

    def _told_early(self, asked: Mapping[str, CaptureSpec]) -> list[CaptureSpec]:
        """Return the specs of ranks chosen by rank 0's first message, once that is there.

        Ranks that were captured or ``asked`` for already are left out.
        """
        spec, chosen = asked.get("0"), self.after_first_message
        if spec is None or chosen is None or not spec.first_message_path.exists():
            return []
        trace = load_trace(spec.first_message_path)
        spec.first_message_path.unlink()
        further = [r for r in chosen(trace) if r not in self.traces and str(r) not in asked]
        self._needed += len(further)
        return self._specs(further)

    def _start(self, children: Children, spec: CaptureSpec) -> None:
        spec.save(spec.path)
        spec.error_path.unlink(missing_ok=True)
        spec.first_message_path.unlink(missing_ok=True)
        kind = "slice" if spec.slice else "capture"
        self._run_rank(
            children, str(spec.rank), spec.path, self.logs / f"{kind}-rank-{spec.rank}.log"
        )

    def _run_rank(self, children: Children, name: str, spec_path: Path, log: Path) -> None:
        running = children.all_running()
        slot = next(s for s in range(self.jobs) if self._slots.get(s) not in running)
        program = Program(
            name=name, module=CaptureSpec.PROCESS, arguments=(str(spec_path),), log=log, slot=slot
        )
        self._slots[slot] = self.starter.start(children, program)

    @staticmethod
    def _captured_before(path: Path) -> RankTrace:
        try:
            return load_trace(path)
        except FormatError as error:
            raise FormatError(f"{error}; capture again with --fresh") from error

    def _add_ballast(self, children: Children) -> None:
        """Keep every core busy with repeated ranks whose results are not used.

        Where ranks of the target share a processor, a rank that is captured beside idle cores would
        run faster than it ever does in the job.
        """
        running = _ranks(children)
        while running and children.running < self.jobs:
            self._ballast += 1
            out = self.logs / f"ballast-{self._ballast}"
            spec = replace(self.spec, rank=int(running[0].name), out=str(out))
            spec.save(spec.path)
            self._run_rank(children, BALLAST, spec.path, out / "log")

    @staticmethod
    def _collect(child: Child, spec: CaptureSpec) -> RankTrace:
        spec.path.unlink(missing_ok=True)
        if child.process.returncode == 0 and spec.trace_path.exists():
            return load_trace(spec.trace_path)
        raise failure_of(child, spec.rank, spec.error_path, "capture")

    def _add(self, trace: RankTrace) -> None:
        self.traces[trace.rank] = trace
        if self.progress is not None:
            self.progress(len(self.traces), max(self._needed, len(self.traces)))

    def _refuse_slow(self, children: Children) -> None:
        for child in children.all_running():
            if child.name != BALLAST and time.monotonic() - child.began > self.timeout_s:
                raise UsageError(
                    f"rank {child.name} was not captured within {self.timeout_s:g} s "
                    f"(--capture-timeout); the end of its output ({child.log}):\n"
                    f"{child.log_tail()}"
                )


_FINAL = (SystemExit.__name__, KeyboardInterrupt.__name__, "OutOfMemoryError")
"""Exceptions that would come again, whatever other ranks leave."""


def _ranks(children: Children) -> list[Child]:
    """Return the running children without the ballast that only keeps cores busy."""
    return [child for child in children.all_running() if child.name != BALLAST]


def _may_have_been_early(child: Child, spec: CaptureSpec) -> bool:
    """Return whether the program may have failed because another rank had not written its files.

    This may be a file behind a barrier, which makes no rank wait here (for example the index of a
    data set), or the sizes and objects that a rank of its kind sends in another group. Such a rank
    runs again when the ranks beside it have ended. The ranks of a slice really wait for each other,
    and none of them can run again alone.
    """
    found = load_failure(spec.error_path) if child.process.returncode and not spec.slice else None
    return found is not None and not found["ours"] and found["kind"] not in _FINAL
