"""prismscale from Python: for sweeps, notebooks and assertions in CI.

``import prismscale as ps`` gives these names; the command line is made of the same ones.
"""

from __future__ import annotations

import html
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.result import RunResult
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleWarning, StuckError, UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.hoped_run import HopedRun, HopedRuns
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import Changes, load_recording
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace
from prismscale.job import Job
from prismscale.live.live_spec import LogLine
from prismscale.processes.starter import Starter
from prismscale.progress import Reporter, SilentReporter
from prismscale.report.folder import read_results
from prismscale.report.units import size
from prismscale.runfolder import RunFolder
from prismscale.torch_versions import torch_remark

DEFAULT_OUT = Path("runs/latest")
SHOWN_QUANTILES = (0.05, 0.5, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The step of a job; and what one without variation is made of, on average over stages."""

    ns: int
    """The median of drawn steps, as the run shows it."""
    without_variation_ns: int
    computation: float
    """Fraction of the step without variation."""
    communication: float
    """The same; exposed, with no computation of the rank beside it."""

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return self.ns / 1e6

    @property
    def waiting(self) -> float:
        """Fraction of the step: bubbles of the pipeline, and ranks that wait for each other."""
        return max(0.0, 1.0 - self.computation - self.communication)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The step time as a distribution."""

    step_ns_D: NDArray[np.int64]
    """Of every draw."""
    base_ns: int
    """Without variation."""
    notes: tuple[str, ...]
    """How it was drawn."""

    def quantile_ms(self, q: float) -> float:
        """A quantile of the step time.

        Raises:
            UsageError: ``q`` is not between 0 and 1.
        """
        if not 0 <= q <= 1:
            raise UsageError(f"quantile {q}; allowed: 0 … 1")
        return float(np.quantile(self.step_ns_D, q)) / 1e6

    def _repr_html_(self) -> str:
        rows = [(f"p{100 * q:g}", f"{self.quantile_ms(q):.3f} ms") for q in SHOWN_QUANTILES]
        return _table([("without variation", f"{self.base_ns / 1e6:.3f} ms"), *rows])


@dataclass(frozen=True)
class Run:
    """A run folder, read as it is asked for."""

    folder: Path

    @cached_property
    def result(self) -> RunResult:
        """Everything that the run found out: the contents of ``results.json``."""
        return read_results(RunFolder(root=self.folder))

    @property
    def step(self) -> StepTime:
        """The step of the job.

        Raises:
            StuckError: the job hangs, so it has none.
        """
        found = self.result
        if found.hung:
            raise StuckError("the job hangs, so it has no step: " + "; ".join(found.hangs))
        parts = [stage.breakdown for stage in found.stages]
        total = sum(part.step_ns for part in parts) or 1
        return StepTime(
            ns=found.median_ns,
            without_variation_ns=found.step_ns,
            computation=sum(part.total_compute_ns for part in parts) / total,
            communication=sum(part.total_exposed_ns for part in parts) / total,
        )

    @property
    def memory(self) -> Mapping[str, int]:
        """Highest allocated bytes of a captured rank, by pipeline stage (``all ranks`` where there
        is no pipeline); without stages whose memory was not followed."""
        stages = self.result.stages
        return {s.name: s.peak_bytes for s in stages if s.peak_bytes is not None}

    @cached_property
    def graph(self) -> JobGraph:
        """The execution graph of the whole job."""
        return load_graph(RunFolder(root=self.folder).graph)

    def trace(self, rank: int) -> RankTrace:
        """The program of a rank: that of its class.

        Raises:
            UsageError: there is no such rank.
        """
        if not 0 <= rank < self.graph.world_size:
            raise UsageError(
                f"rank {rank} does not exist; ranks are 0 … {self.graph.world_size - 1}"
            )
        return self.graph.classes[int(self.graph.class_of_R[rank])].trace

    def forecast(
        self,
        *,
        draws: int = 1000,
        seed: int = 0,
        variability: str | None = None,
        cluster: str | None = None,
        compute_scale: float | None = None,
        slow: Mapping[int, float] | None = None,
        kernels: Path | str | None = None,
        what_ifs: Sequence[str] | None = None,
    ) -> Forecast:
        """Draw the step time; what is given is changed without another capture.

        Args:
            draws: how many.
            seed: of the random numbers.
            variability: for a run on the null device a profile, a preset's name or a TOML file;
                ``recorded``; ``none``: every draw is the run's step. None: the run's profile if it
                has one, else as recorded.
            cluster: preset or TOML file in place of the run's.
            compute_scale: factor on all computation, in place of the run's.
            slow: factor on a rank's computation, by rank, in place of the run's.
            kernels: measured kernel times, for runs on the null device.
            what_ifs: something that is otherwise, for example ``kernel=attention.* x0.5``; see
                ``docs/what-if.md``.

        Raises:
            UsageError: a what-if that touches nothing, a change that needs another capture, or
                values that cannot be.
            FormatError: damaged files, or those of an older version.
        """
        changes = Changes(
            cluster=cluster,
            compute_scale=compute_scale,
            slow=None if slow is None else dict(slow),
            kernels=None if kernels is None else str(kernels),
            variability=variability,
            what_ifs=None if what_ifs is None else tuple(what_ifs),
        )
        model = model_of(load_recording(self.folder, changes=changes))
        config = model.drawn(MonteCarlo(draws=draws, seed=seed))
        drawn = draw_steps(model.graph, model.source, config, base=model.base)
        return Forecast(step_ns_D=drawn.step_ns_D, base_ns=model.step_ns, notes=model.notes)

    def what_if(self, *what_ifs: str, draws: int = 400, seed: int = 0) -> HopedRun:
        """The run beside what it would be, without another capture.

        Args:
            what_ifs: for example ``kernel=attention.* x0.5``; several hold together. See
                ``docs/what-if.md``.
            draws: how many of the step time, of each side.
            seed: of the random numbers, the same for both.

        Raises:
            UsageError: one that means or touches nothing, or that needs another capture.
        """
        config = MonteCarlo(draws=draws, seed=seed)
        runs = HopedRuns(
            load=lambda asked: load_recording(self.folder, changes=asked),
            changes=Changes(),
            config=config,
        )
        return runs.compare(what_ifs)

    def _repr_html_(self) -> str:
        found = self.result
        step = "hangs" if found.hung else f"{self.step.ms:.3f} ms"
        stages = [(f"peak memory, {name}", size(peak)) for name, peak in self.memory.items()]
        head = [("program", found.command), ("ranks", f"{found.world_size:,} on {found.cluster}")]
        return _table([*head, ("step", step), *stages])


def run(
    script: str | Path,
    *,
    world_size: int,
    args: Sequence[str] = (),
    cluster: str = "h100-sxm",
    device: str = "cpu",
    out: Path | str = DEFAULT_OUT,
    is_module: bool = False,
    live: Iterable[int] = (),
    steps: int = 8,
    samples: int = 4,
    compute_scale: float = 1.0,
    slow: Mapping[int, float] | None = None,
    hang: Mapping[int, int] | None = None,
    what_ifs: Sequence[str] = (),
    kernels: Path | str | None = None,
    fused: bool = False,
    variability: str | None = None,
    step_marker: str | None = None,
    memory: bool = True,
    fresh: bool = False,
) -> Run:
    """Run any rank of a training job of any world size on this machine.

    Args:
        script: the program, a path or (``is_module``) a module's name.
        world_size: ranks of the target job.
        args: of the program.
        cluster: preset name or TOML file.
        device: ``cpu``, ``cuda`` or ``null``, a GPU that is not there.
        out: run folder; captures in it are used again.
        live: ranks that run the program among replayed ones.
        steps: steady steps of live ranks.
        samples: steady steps measured in each capture.
        compute_scale: factor on all computation.
        slow: factor on a rank's computation, by rank.
        hang: steady step at whose beginning a rank stops for ever, by rank.
        what_ifs: something that is otherwise, for live ranks too: see ``docs/what-if.md``.
        kernels: measured kernel times that go before a null device's model.
        fused: lower nothing that torch.compile is asked for, and cost elementwise work by a rule
            of fusion, on a null device.
        variability: profile that forecasts of a null run take, a preset's name or a TOML file;
            ``none`` for none; None: the cluster's.
        step_marker: ``module:function`` that ends a step; None: optimizer steps are found.
        memory: follow allocations.
        fresh: capture again.

    Raises:
        PrismscaleError: any of its kinds; see ``docs/command-line.md`` for what each asks for.
    """
    config = JobConfig(
        script=Script(target=str(script), args=tuple(map(str, args)), is_module=is_module),
        world_size=world_size,
        cluster=cluster,
        out=Path(out),
        live=tuple(live),
        device=device,
        steps=steps,
        samples=samples,
        compute_scale=compute_scale,
        slow=dict(slow or {}),
        hang=dict(hang or {}),
        what_ifs=tuple(what_ifs),
        kernels=None if kernels is None else Path(kernels),
        fused=fused,
        variability=variability,
        step_marker=step_marker,
        memory=memory,
        fresh=fresh,
    )
    perform(config)
    return load(config.out)


def load(folder: Path | str) -> Run:
    """An earlier run.

    Raises:
        UsageError: the folder holds none.
    """
    path = Path(folder)
    if not RunFolder(root=path).results.is_file():
        raise UsageError(f"{path} holds no run: make one with prismscale run --out {path}")
    return Run(path)


def perform(
    config: JobConfig,
    *,
    reporter: Reporter | None = None,
    log_line: LogLine | None = None,
    starter: Starter | None = None,
    executor: Executor | None = None,
) -> RunResult:
    """Run a job and write its folder: what :func:`run` and ``prismscale run`` do.

    Args:
        reporter: told of progress; None: nobody is.
        log_line: takes what live ranks print.
        starter: starts all processes, elsewhere or under limits; None: here, as forks of one.
        executor: draws steps for the summary; None: this process does. One that starts processes
            imports the main module in each, which must then guard what it does.

    Raises:
        PrismscaleError: any of its kinds; nothing half-written is left behind.
    """
    config.load_cluster()
    if remark := torch_remark():
        warnings.warn(remark, PrismscaleWarning, stacklevel=2)
    with RunFolder(root=config.out).opened(fresh=config.fresh) as folder:
        job = Job(
            config=config,
            folder=folder,
            reporter=reporter or SilentReporter(),
            log_line=log_line or (lambda rank, line: None),
            starter=starter,
            executor=executor,
        )
        return job.run()


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"
