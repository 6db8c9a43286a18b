"""The Python API of prismscale: for sweeps, notebooks and assertions in CI.

``import prismscale as ps`` gives these names; the command line uses the same ones.
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
from prismscale.analysis.wanted import Wanted
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
    """Step time of a job, and the parts of a step without variation, averaged over stages."""

    ns: int
    """Median of the drawn steps, as the run shows it."""
    without_variation_ns: int
    computation: float
    """Computation as a fraction of the step without variation."""
    communication: float
    """Exposed communication, the same fraction: the rank computes nothing at the same time."""

    @property
    def ms(self) -> float:
        """Median step time in milliseconds."""
        return self.ns / 1e6

    @property
    def waiting(self) -> float:
        """Waiting as a fraction of the step: pipeline bubbles, and ranks waiting for each other."""
        return max(0.0, 1.0 - self.computation - self.communication)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The step time as a distribution."""

    step_ns_D: NDArray[np.int64]
    """Step time of each draw, shape (draws)."""
    base_ns: int
    """Step time without variation."""
    notes: tuple[str, ...]
    """Sentences on how the steps were drawn."""

    def quantile_ms(self, q: float) -> float:
        """Return a quantile of the step time in milliseconds.

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
    """A run folder, whose files are read on demand."""

    folder: Path

    @cached_property
    def result(self) -> RunResult:
        """All results of the run: the contents of ``results.json``."""
        return read_results(RunFolder(root=self.folder))

    @property
    def step(self) -> StepTime:
        """Step time of the job.

        Raises:
            StuckError: the job hangs, so it has no step.
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
        """Highest allocated bytes of a captured rank, by pipeline stage.

        The key is ``all ranks`` without a pipeline. Stages without tracked memory are left out.
        """
        stages = self.result.stages
        return {s.name: s.peak_bytes for s in stages if s.peak_bytes is not None}

    @cached_property
    def graph(self) -> JobGraph:
        """The execution graph of the whole job."""
        return load_graph(RunFolder(root=self.folder).graph)

    def trace(self, rank: int) -> RankTrace:
        """Return the program of a rank, which is that of its class.

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
        """Draw the step time, with the given changes of the run and without another capture.

        Args:
            draws: number of draws.
            seed: seed of the random numbers.
            variability: for a run on the null device a profile (a preset's name or a TOML file);
                ``recorded``; or ``none``: every draw is the run's step. None: the run's profile if
                it has one, else as recorded.
            cluster: preset or TOML file in place of the run's.
            compute_scale: factor on all computation, in place of the run's.
            slow: factor on a rank's computation, by rank, in place of the run's.
            kernels: measured kernel times, for runs on the null device.
            what_ifs: hypothetical changes, for example ``kernel=attention.* x0.5``; see
                ``docs/what-if.md``.

        Raises:
            UsageError: a what-if that touches nothing, a change that needs another capture, or
                values that are not allowed.
            FormatError: damaged files, or files of an older version.
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
        """Compare the run with the same run under what-ifs, without another capture.

        Args:
            what_ifs: for example ``kernel=attention.* x0.5``; several apply together. See
                ``docs/what-if.md``.
            draws: number of draws of the step time, for each of the two.
            seed: seed of the random numbers, the same for both.

        Raises:
            UsageError: a what-if that has no meaning, touches nothing, or needs another capture.
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
        world_size: number of ranks of the target job.
        args: arguments of the program.
        cluster: preset name or TOML file.
        device: ``cpu``, ``cuda`` or ``null`` (a GPU that is not there).
        out: run folder; captures in it are used again.
        live: ranks that run the program among replayed ranks.
        steps: steady steps that each live rank runs.
        samples: steady steps measured in each capture.
        compute_scale: factor on all computation.
        slow: factor on a rank's computation, by rank.
        hang: steady step at the beginning of which a rank stops for ever, by rank.
        what_ifs: hypothetical changes, which also apply to live ranks: see ``docs/what-if.md``.
        kernels: measured kernel times, which take precedence over a null device's model.
        fused: on a null device, lower nothing that torch.compile is asked for, and cost elementwise
            work by a fusion rule.
        variability: profile for forecasts of a null run, a preset's name or a TOML file; ``none``:
            no profile. None: the cluster's.
        step_marker: ``module:function`` that ends a step. None: optimizer steps are detected.
        memory: track allocations.
        fresh: capture again.

    Raises:
        PrismscaleError: any of its subclasses; ``docs/command-line.md`` says what each means.
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
    """Return an earlier run.

    Raises:
        UsageError: the folder holds no run.
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
    wanted: Wanted | None = None,
) -> RunResult:
    """Run a job and write its folder, as :func:`run` and ``prismscale run`` do.

    Args:
        config: the job.
        reporter: receives progress. None: nothing is reported.
        log_line: receives each line that a live rank prints.
        starter: starts all processes, elsewhere or under limits. None: they are forked here from
            one server process.
        executor: draws steps for the summary. None: this process draws them. An executor that
            starts processes imports the main module in each, so that module must guard its own
            actions (``if __name__ == "__main__"``).
        wanted: what the report's answers depend on, besides the job. None: no price is known.

    Raises:
        PrismscaleError: any of its subclasses; no half-written file is left behind.
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
            wanted=wanted or Wanted(),
        )
        return job.run()


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"
