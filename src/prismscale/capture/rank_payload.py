"""Where the values come from that other ranks would send to an emulated one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prismscale.capture.device.null.emulation import NullEmulation
from prismscale.capture.device.null.messages import ZeroIntegers, exact_value
from prismscale.capture.payload import CompositePayload, MirrorPayload
from prismscale.capture.recorded_payload import RecordedPayload


def rank_payload(
    folder: Path,
    emulation: NullEmulation | None,
    *,
    is_captured_now: Callable[[int], bool] = lambda rank: False,
) -> CompositePayload:
    """Recordings in ``folder`` first, then what is true of the device, then the mirror."""
    if emulation is None:
        recorded = RecordedPayload(folder, is_captured_now=is_captured_now)
        return CompositePayload([recorded], MirrorPayload())
    recorded = RecordedPayload(folder, is_captured_now=is_captured_now, value_of=exact_value)
    return CompositePayload([recorded, ZeroIntegers()], MirrorPayload())
