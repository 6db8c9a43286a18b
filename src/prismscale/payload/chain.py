"""Where the values come from that other ranks would send to an emulated one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from prismscale.devices.null.session import NullEmulation
from prismscale.payload.mirror import CompositePayload, MirrorPayload
from prismscale.payload.null_integers import ZeroIntegers, exact_value
from prismscale.payload.recorded import RecordedPayload


def rank_payload(
    folder: Path,
    emulation: NullEmulation | None,
    *,
    is_captured_now: Callable[[int], bool] = lambda rank: False,
) -> CompositePayload:
    """Recordings in ``folder`` first, then what is true of the device, then the mirror."""
    value_of = torch.Tensor.detach if emulation is None else exact_value
    recorded = RecordedPayload(folder, is_captured_now=is_captured_now, value_of=value_of)
    of_device = [] if emulation is None else [ZeroIntegers()]
    return CompositePayload([recorded, *of_device], MirrorPayload())
