"""Which device of this machine a rank computes on."""

from __future__ import annotations

import os

import pytest

from prismscale.devices.select import claim_device
from prismscale.errors import UsageError


def test_a_gpu_is_one_of_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted among those, as torch counts them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    claim_device("cuda", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_where_all_are_visible_the_number_is_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has hidden any."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    claim_device("cuda", 3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_devices_that_are_not_there_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what there is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match="is not there"):
        claim_device(device, 1000)
