"""prismscale: run any rank of an 8,192-GPU training job on the machine you have.

From Python: :func:`run` a program, :func:`load` an earlier run, :meth:`Run.forecast` its step time.
In a file of rules: :func:`payload_rule`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from prismscale.errors import PrismscaleError

if TYPE_CHECKING:
    from prismscale.api import Forecast, Run, StepTime, load, run
    from prismscale.payload.rules.rule import Communication, payload_rule

__version__ = "0.1.0"
__all__ = [
    "Communication",
    "Forecast",
    "PrismscaleError",
    "Run",
    "StepTime",
    "__version__",
    "load",
    "payload_rule",
    "run",
]
_OF_RULES = ("Communication", "payload_rule")


def __getattr__(name: str) -> object:
    # Every process of a job imports this package; only callers of the API pay for its imports.
    if name in __all__:
        # A rank's process reads a file of rules, and needs nothing else of the API.
        home = "prismscale.payload.rules.rule" if name in _OF_RULES else "prismscale.api"
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'prismscale' has no attribute {name!r}")
