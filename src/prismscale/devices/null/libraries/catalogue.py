"""All stand-ins, in one list."""

from __future__ import annotations

from prismscale.devices.null.libraries import transformer_engine
from prismscale.devices.null.libraries.stand_in import StandIn


def stand_ins() -> tuple[StandIn, ...]:
    """Those that come with prismscale."""
    return (transformer_engine.stand_in(),)
