"""A run's figures under the TensorBoard tags that torchtitan logs.

Tags and units are those of torchtitan 0.3.0, ``components/metrics.py``. Losses, gradient norms and
the time of data loading are not predicted and have no tag here.
"""

from __future__ import annotations

from prismscale.analysis.answers import answers
from prismscale.analysis.memory.memory_kinds import memory_peak
from prismscale.analysis.memory.memory_log import load_memory_log, memory_path
from prismscale.analysis.result import RunResult
from prismscale.analysis.wanted import Wanted
from prismscale.durations.scenario import Scenario
from prismscale.runfolder import RunFolder

GIB = 2**30


def scalars_of_step(result: RunResult, step_ns: int, asked: Wanted) -> dict[str, float]:
    """Return what torchtitan would log of a step of ``step_ns``, without unknown figures."""
    found, ratio = answers(result, asked), result.median_ns / step_ns
    flops = result.work.unmasked_flops / result.world_size
    told = {
        "throughput(tps)": _times(found.tokens_per_s_per_gpu, ratio),
        "tflops": flops / step_ns / 1e3 if flops else None,
        "mfu(%)": _times(found.mfu_unmasked, 100 * ratio),
        "time_metrics/end_to_end(s)": step_ns / 1e9,
    }
    return {tag: value for tag, value in told.items() if value is not None}


def memory_scalars(folder: RunFolder, result: RunResult) -> dict[str, float]:
    """Return the memory of the fullest GPU; active memory only if its blocks were tracked.

    Raises:
        FormatError: a file is damaged.
    """
    fit = answers(result).fit
    if fit is None:
        return {}
    told = _share("max_reserved", fit.reserved_bytes, fit.capacity_bytes)
    path = memory_path(folder.root / Scenario.load(folder.scenario).captures, fit.rank)
    if path.is_file():
        active = memory_peak(load_memory_log(path)).active_bytes
        told |= _share("max_active", active, fit.capacity_bytes)
    return told


def _share(name: str, n_bytes: int, capacity_bytes: int) -> dict[str, float]:
    return {
        f"memory/{name}(GiB)": n_bytes / GIB,
        f"memory/{name}(%)": 100 * n_bytes / capacity_bytes,
    }


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
