"""How a run's step varies, as ``prismscale forecast`` draws it, for the summary of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prismscale.analysis.result import StepSpread
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import Changes, load_recording

DRAWS = 200
"""Number of draws: enough for the 95th percentile that is shown."""


def step_spread(
    folder: Path,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    executor: Executor | None = None,
    changes: Changes | None = None,
) -> StepSpread:
    """Return quantiles of the step of the run in ``folder``, which holds its graph and scenario.

    Args:
        folder: the run folder.
        draws: number of draws.
        seed: equal seeds give equal draws.
        executor: where draws are made; None: in this process.
        changes: changes to the run's scenario; None: none.

    Raises:
        FormatError: damaged files.
    """
    model = model_of(load_recording(folder, changes=changes))
    config = model.drawn(MonteCarlo(draws=draws, seed=seed))
    drawn = draw_steps(model.graph, model.source, config, base=model.base, executor=executor)
    step_ns_D = drawn.step_ns_D
    p50, p95 = np.quantile(step_ns_D, [0.5, 0.95])
    return StepSpread(
        p50_ns=round(p50), p95_ns=round(p95), mean_ns=round(float(step_ns_D.mean())), draws=draws
    )
