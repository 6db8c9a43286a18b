"""Values of tensors as bytes, for files and messages."""

from __future__ import annotations

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the values of ``tensor`` in order; a copy unless they lie so in host memory."""
    flat = tensor.detach().cpu().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    # One element may have any stride: torch calls that contiguous, and refuses to view it as bytes.
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
