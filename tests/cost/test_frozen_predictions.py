"""A few hundred predictions as they were: whoever moves a constant says so by freezing anew.

    python tools/fit/freeze_predictions.py

Whether predictions are right is asked by ``prismscale validate kernels``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prismscale.cost.kernel import load_kernel_model

FROZEN = json.loads(Path(__file__).with_name("frozen_predictions.json").read_text())


@pytest.mark.parametrize("gpu", sorted(FROZEN))
def test_predictions_are_those_that_were_frozen(gpu: str) -> None:
    """Each call's time on the device, to the nanosecond or a millionth."""
    model = load_kernel_model(gpu)
    moved = {
        signature: (frozen, found)
        for signature, frozen in FROZEN[gpu].items()
        if (found := model.cost(signature).device_ns) != pytest.approx(frozen, rel=1e-6, abs=1)
    }

    assert not moved, f"{len(moved)} of {len(FROZEN[gpu])} moved; meant? freeze them anew"
