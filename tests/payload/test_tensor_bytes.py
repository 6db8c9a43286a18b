"""Values of tensors as bytes."""

from __future__ import annotations

import pytest
import torch

from prismscale.payload.tensor_bytes import tensor_bytes

SEVEN = torch.tensor([[7]])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(6, dtype=torch.int16)[::2],
        torch.tensor(7.0, dtype=torch.bfloat16),
        torch.as_strided(SEVEN, (1, 1), (2048, 2048)),  # as sequences are cut for a group of ranks
        torch.empty(0, 4),
        torch.ones(3, requires_grad=True),
    ],
    ids=["matrix", "transposed", "every other", "scalar", "wide stride", "empty", "parameter"],
)
def test_bytes_are_those_of_the_values_in_order(tensor: torch.Tensor) -> None:
    """However they lie in memory."""
    data = bytes(tensor_bytes(tensor))
    assert len(data) == tensor.numel() * tensor.itemsize
    values = torch.tensor([], dtype=tensor.dtype)
    if data:
        values = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
    assert torch.equal(values, tensor.detach().flatten())
