"""A few hundred predictions as they were: whoever moves a constant says so by freezing anew.

    python tools/fit/freeze_predictions.py

Whether predictions are right is asked by ``prismscale validate kernels``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prismscale.cluster import Cluster
from prismscale.cost.kernel import load_kernel_model
from prismscale.validation.steps.price_version import communication_ns

FROZEN = json.loads(Path(__file__).with_name("frozen_predictions.json").read_text())


COMMUNICATION = "communication of "


@pytest.mark.parametrize("name", sorted(n for n in FROZEN if n.startswith(COMMUNICATION)))
def test_communication_takes_what_was_frozen(name: str) -> None:
    """Each collective's time after the last arrival."""
    found = communication_ns(Cluster.load(name.removeprefix(COMMUNICATION)))

    assert found == pytest.approx(FROZEN[name], rel=1e-6, abs=1)


@pytest.mark.parametrize("gpu", sorted(n for n in FROZEN if not n.startswith(COMMUNICATION)))
def test_predictions_are_those_that_were_frozen(gpu: str) -> None:
    """Each call's time on the device, to the nanosecond or a millionth."""
    model = load_kernel_model(gpu)
    moved = {
        signature: (frozen, found)
        for signature, frozen in FROZEN[gpu].items()
        if (found := model.cost(signature).device_ns) != pytest.approx(frozen, rel=1e-6, abs=1)
    }

    assert not moved, f"{len(moved)} of {len(FROZEN[gpu])} moved; meant? freeze them anew"
