"""Calibrates the models' times by a user's measured steps: ``prismscale calibrate steps``.

[Note: two figures] A measured step is one figure, and many things may be its cause. Two factors
differ from machine to machine and affect every program: the time of kernels (clocks, power, a build
of the libraries) and the time that the host takes to issue them (processor, versions, the program's
own Python). Wide jobs determine the first, narrow ones the second. Each factor moves away from 1 as
far as the steps speak for it against prior knowledge: a least-squares fit to the logarithms of
steps and factors, relative to their errors. A step that nothing explains counts less (soft L1).
Communication keeps its model's times: ``prismscale calibrate nccl-tests`` uses measurements of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from prismscale.analysis.step_error import HOST_SLOWER
from prismscale.cluster import Calibration, Cluster
from prismscale.durations.altered import Alteration
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.runfolder import RunFolder
from prismscale.sim.hoped import hoped_job
from prismscale.sim.retime import retime

_NINE_OF_TEN = 1.645
"""Standard deviations to either side that hold nine tenths of a normal distribution."""
KERNELS_ERROR = 0.12
"""Error that nine steps of ten stay within, on GPUs whose kernels the model was fitted on. It is
the p90 of those whole steps of ``prismscale validate steps`` that kernels decide."""
STEP_ERROR = 0.05
"""Error that nine of ten steps of one machine stay within when both factors are right. SimuMax's
scored runs on B200s lie within 4.3 % of their median error."""
PROGRAMS_DIFFER = 0.2
"""Difference of one host's pace between programs. Six steps of narrow models on A100s took 0.99 to
1.21 of what one pace says (``bench/vtrain_layouts.py``; they are not scored)."""
TOLD = 0.75
"""Share of a factor's prior error. If more of it is left, steps have not determined the factor."""


def _deviation(error: float) -> float:
    """Return the standard deviation of a factor's logarithm.

    The factor is within 1 + ``error`` nine times of ten.
    """
    return math.log1p(error) / _NINE_OF_TEN


_BEFORE_F = np.array([_deviation(KERNELS_ERROR), _deviation(HOST_SLOWER)])
"""Prior standard deviations of both factors' logarithms around 0."""
_FIRST_HOSTS = tuple(2.0 ** (n / 2) for n in range(-2, 6))
"""Factors on the host's time from which the search begins. Where the device decides a step, a small
change of the host's time changes nothing, so slopes alone would not find the factor."""
_CHANGE = 0.02
"""Change of a factor's logarithm for finite-difference slopes."""
_MOST_EVALUATIONS = 12
MOST_MODELLED = len(_FIRST_HOSTS) + 5 * _MOST_EVALUATIONS
"""Largest number of times that a step is modelled. It is once for each start and each place of the
search, and four times more at each place for slopes."""

StepModel = Callable[[float, float], float]
"""Returns the step in nanoseconds, given the factors on kernels' time and on the host's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredJob:
    """A job whose step was measured, and the model of its step."""

    measured_ns: float
    model: StepModel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCalibration:
    """Result of a calibration by measured steps."""

    calibration: Calibration
    kernels_error: float
    """Relative error that the factor on kernels stays within in nine cases of ten."""

    @property
    def tells_host(self) -> bool:
        """Whether the steps tell the host's time better than it was known before."""
        return self.calibration.host_error < TOLD * HOST_SLOWER


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """The step of a stored run with other factors, without another capture."""

    folder: Path
    step_ns: int
    """Step time of the run without variation."""
    median_ns: int
    """Median step time, as the run shows it."""

    @cached_property
    def scenario(self) -> Scenario:
        """The run's scenario.

        Raises:
            UsageError: there is no run, or its computation was measured.
            FormatError: damaged files.
        """
        path = RunFolder(root=self.folder).scenario
        if not path.is_file():
            raise UsageError(f"{self.folder} holds no run; make it with prismscale run --out")
        found = Scenario.load(path)
        if found.kernel_costs is None:
            raise UsageError(
                f"{self.folder}: the computation of this run was measured; a calibration is of "
                "modelled times: run the program with --device null"
            )
        return found

    @property
    def cluster(self) -> Cluster:
        """The run's cluster without a calibration, so with the models' own times."""
        cluster = self.scenario.cluster
        return replace(cluster, device=replace(cluster.device, calibration=None))

    def with_factors(self, kernels: float, host: float) -> float:
        """Return the step in ns that the run would show with the given factors.

        They are factors on kernels' and on the host's time. The result is the step without
        variation, times the ratio by which variation lengthens the stored run's step.

        Raises:
            UsageError: logs are missing, or were captured with other prices of kernels than
                today's.
        """
        factors = Calibration(kernels=kernels, host=host, host_error=HOST_SLOWER, steps=1)
        device = replace(self.cluster.device, calibration=factors)
        scenario = replace(self.scenario, cluster=replace(self.cluster, device=device))
        alteration = Alteration(scenario=scenario, root=self.folder, stored=self.scenario)
        retimed = retime(hoped_job(self._graph, alteration).durations)
        return retimed.step_ns * self.median_ns / self.step_ns

    @cached_property
    def _graph(self) -> JobGraph:
        return load_graph(RunFolder(root=self.folder).graph)


def calibrate_steps(
    steps: Sequence[MeasuredJob], update: Callable[[], None] | None = None
) -> StepCalibration:
    """Return the factors that measured steps speak for. See [Note: two figures].

    Args:
        steps: one or more.
        update: called after each evaluation of a model.
    """
    search = _Search(steps=steps, update=update)
    start = min((np.array([0.0, math.log(host)]) for host in _FIRST_HOSTS), key=search.cost)
    found = least_squares(
        search.residuals,
        start,
        jac=search.slopes,
        loss=search.loss,
        xtol=1e-3,
        ftol=1e-4,
        max_nfev=_MOST_EVALUATIONS,
    )
    kernels, host = (round(math.exp(x), 4) for x in found.x)
    kernels_error, host_error = search.errors(found.x, found.jac[: len(steps)])
    return StepCalibration(
        calibration=Calibration(
            kernels=kernels, host=host, host_error=host_error, steps=len(steps)
        ),
        kernels_error=kernels_error,
    )


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Residuals of the steps, followed by those of the two factors.

    Axes: ``N`` steps, ``F`` logarithms of the factors.
    """

    steps: Sequence[MeasuredJob]
    update: Callable[[], None] | None
    _known: dict[tuple[float, float], NDArray[np.float64]] = field(default_factory=dict)

    def residuals(self, log_F: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far steps are from measurement and factors from 1.

        Both are logarithms, in standard deviations.
        """
        return np.array([*(self._apart(log_F) / _deviation(STEP_ERROR)), *(log_F / _BEFORE_F)])

    def slopes(self, log_F: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the slopes of the residuals.

        They are central differences, because steps are whole nanoseconds.
        """
        columns = []
        for shift in np.eye(2) * _CHANGE:
            above, below = (self.residuals(log_F + s) for s in (shift, -shift))
            columns.append((above - below) / (2 * _CHANGE))
        return np.array(columns).T

    def cost(self, log_F: NDArray[np.float64]) -> float:
        """Return the value that the search minimises."""
        return float(np.sum(self.loss(self.residuals(log_F) ** 2)[0]))

    def loss(self, squares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss of squared residuals, with both derivatives.

        It is soft L1 for steps, because one may be of another program than it says. Factors'
        squares stay as they are.
        """
        steps = slice(0, len(self.steps))
        found = np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
        root = np.sqrt(1 + squares[steps])
        found[:, steps] = 2 * (root - 1), 1 / root, -0.5 / root**3
        return found

    def errors(
        self, log_F: NDArray[np.float64], slopes_NF: NDArray[np.float64]
    ) -> tuple[float, float]:
        """Return the relative errors that both factors stay within in nine cases of ten.

        The host's error is for another program than those that were measured.

        Args:
            log_F: logarithms of the fitted factors.
            slopes_NF: slopes of the steps' residuals at these factors, weighted by the loss.
        """
        squares_N = self.residuals(log_F)[: len(self.steps)] ** 2
        # Steps that deviate by more than their expected error tell less.
        apart = max(1.0, float(np.mean(self.loss(squares_N)[0])))
        known_FF = slopes_NF.T @ slopes_NF / apart + np.diag(_BEFORE_F**-2)
        error_F = np.expm1(_NINE_OF_TEN * np.sqrt(np.diag(np.linalg.inv(known_FF))))
        host_error = min(math.hypot(error_F[1], PROGRAMS_DIFFER), HOST_SLOWER)
        return round(float(error_F[0]), 4), round(host_error, 4)

    def _apart(self, log_F: NDArray[np.float64]) -> NDArray[np.float64]:
        key = float(log_F[0]), float(log_F[1])
        if key not in self._known:
            self._known[key] = np.array([self._log_error(step, *key) for step in self.steps])
        return self._known[key]

    def _log_error(self, step: MeasuredJob, log_kernels: float, log_host: float) -> float:
        found_ns = step.model(math.exp(log_kernels), math.exp(log_host))
        if self.update is not None:
            self.update()
        return math.log(found_ns / step.measured_ns)
