"""prismscale: run any rank of an 8,192-GPU training job on the machine you have.

From Python: :func:`run` a program, :func:`load` an earlier run, :meth:`Run.forecast` its step time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from prismscale.errors import PrismscaleError

if TYPE_CHECKING:
    from prismscale.api import Forecast, Run, StepTime, load, run

__version__ = "0.1.0"
__all__ = ["Forecast", "PrismscaleError", "Run", "StepTime", "__version__", "load", "run"]


def __getattr__(name: str) -> object:
    # Every process of a job imports this package; only who calls the API pays for what it needs.
    if name in __all__:
        return getattr(import_module("prismscale.api"), name)
    raise AttributeError(f"module 'prismscale' has no attribute {name!r}")
