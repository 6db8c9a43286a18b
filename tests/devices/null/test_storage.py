"""Storages of the null device as Python makes them: copies, pickles, checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch


def test_a_deep_copy_has_memory_of_its_own() -> None:
    """As for a moving average of a model's weights."""
    model = torch.nn.Linear(1024, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    twin = copy.deepcopy(model)

    assert twin.weight.shape == (1024, 1024)
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    assert torch.cuda.memory_allocated() - before == 4 * (1024 * 1024 + 1024)


def test_a_deep_copy_keeps_what_is_known() -> None:
    """Small exact values are copied along."""
    assert copy.deepcopy(torch.tensor([1, 2], device="cuda")).tolist() == [1, 2]


@pytest.mark.parametrize("where", [None, "cpu", "cuda:3"])
def test_a_checkpoint_can_be_loaded(where: str | None) -> None:
    """Known values survive torch.save; the tensor comes back to where it was, or is told to."""
    file = io.BytesIO()
    torch.save({"steps": torch.tensor([7.0], device="cuda:1")}, file)
    file.seek(0)
    steps = torch.load(file, map_location=where)["steps"]

    assert steps.tolist() == [7.0]
    assert steps.device == torch.device(where or "cuda:1")


def test_storages_of_the_host_are_as_ever() -> None:
    """Sizes, sequences and no argument at all make CPU storages."""
    assert torch.UntypedStorage(8).nbytes() == 8
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]
    assert torch.UntypedStorage().nbytes() == 0
