"""Kernels over lists of tensors: Apex's, which Transformer Engine took over.

Both libraries' extensions have the same functions, and the same limits per launch.
Source: csrc/multi_tensor_apply.cuh and its users in Apex; common/multi_tensor and
pytorch/csrc/extensions/multi_tensor of Transformer Engine 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory

Lists = Sequence[Sequence[Tensor]]
_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30, 24)
"""Most tensors of a list in one launch, by the number of lists (from 1)."""
_BLOCKS_PER_LAUNCH = 320
_PARTIAL_SUMS = 320
_ADAMS = ("adam", "adam_param_remainder", "adam_fp8", "adam_capturable", "adam_capturable_master")


def launches_of(lists: Lists, chunk_size: int) -> int:
    """Return the number of kernels that ``lists`` take, given the limits on tensors and chunks."""
    chunks = sum(math.ceil(tensor.numel() / chunk_size) for tensor in lists[0])
    by_tensors = math.ceil(len(lists[0]) / _TENSORS_PER_LAUNCH[len(lists) - 1])
    return max(1, by_tensors, math.ceil(chunks / _BLOCKS_PER_LAUNCH))


def functions(library: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``library``, by the names that its extension gives them."""

    def scale(chunk_size: int, noop: Tensor, lists: Lists, *_: Any) -> None:
        """Write the first list, scaled, to the second."""
        cost = memory("foreach", launches=launches_of(lists, chunk_size))
        launch(f"{library}::multi_tensor_scale", cost, reads=lists[0], writes=lists[1])

    def axpby(chunk_size: int, noop: Tensor, lists: Lists, *_: Any) -> None:
        """Write the sum of the first two lists, scaled, to the third."""
        cost = memory("foreach", launches=launches_of(lists, chunk_size))
        reads = [*lists[0], *lists[1]]
        launch(f"{library}::multi_tensor_axpby", cost, reads=reads, writes=lists[2])

    def l2norm(
        chunk_size: int, noop: Tensor, lists: Lists, per_tensor: bool | None = False
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of all tensors together and, with ``per_tensor``, of each."""
        return _l2norm(library, "multi_tensor_l2norm", chunk_size, lists, bool(per_tensor))

    def unscale_l2norm(
        chunk_size: int,
        noop: Tensor,
        lists: Lists,
        inverse_scale: Tensor,
        per_tensor: bool | None = False,
    ) -> tuple[Tensor, Tensor]:
        """As ``l2norm``, of the tensors times ``inverse_scale``."""
        name = "multi_tensor_unscale_l2norm"
        return _l2norm(library, name, chunk_size, lists, bool(per_tensor))

    names = [f"multi_tensor_{name}" for name in (*_ADAMS, "sgd")]
    return {
        "multi_tensor_scale": scale,
        "multi_tensor_scale_tensor": scale,
        "multi_tensor_axpby": axpby,
        "multi_tensor_l2norm": l2norm,
        "multi_tensor_unscale_l2norm": unscale_l2norm,
        **{name: update(library, name) for name in names},
    }


def update(library: str, name: str) -> Callable[..., None]:
    """Return an optimizer's step, which writes all lists that it is given but the gradients.

    The lists are gradients, parameters, moments and, for some, a copy of the parameters in another
    type.
    """

    def step(chunk_size: int, noop: Tensor, lists: Lists, *_: Any) -> None:
        cost = memory("optimizer", launches=launches_of(lists, chunk_size))
        reads = [tensor for each in lists for tensor in each]
        writes = [tensor for each in lists[1:] for tensor in each]
        launch(f"{library}::{name}", cost, reads=reads, writes=writes)

    return step


def _l2norm(
    library: str, name: str, chunk_size: int, lists: Lists, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    device, count = lists[0][0].device, len(lists[0])
    sums = torch.zeros(_PARTIAL_SUMS, dtype=torch.float32, device=device)
    chunks = max(math.ceil(tensor.numel() / chunk_size) for tensor in lists[0])
    if per_tensor:
        parts = torch.zeros(count * chunks, dtype=torch.float32, device=device)
    else:
        parts = torch.empty(0, dtype=torch.float32, device=device)
    each = torch.empty(count if per_tensor else 0, dtype=torch.float32, device=device)
    total = torch.empty(1, dtype=torch.float32, device=device)
    cost = memory("foreach_reduction", launches=launches_of(lists, chunk_size) + 1)
    launch(f"{library}::{name}", cost, reads=[*lists[0], sums, parts], writes=[total, each])
    return total, each
