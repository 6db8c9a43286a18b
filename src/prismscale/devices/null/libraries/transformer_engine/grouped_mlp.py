"""Inputs that Transformer Engine prepares for cuDNN frontend's fused products of experts.

They are the addresses of each expert's weights, and the weights' scales in the tensor cores' order.
Source: pytorch/csrc/extensions/grouped_mlp.cpp of Transformer Engine 2.18, and utils.cpp of 2.16.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import empty_as

_TE = "transformer_engine::"


def copy_data_ptrs_to_device(tensors: Sequence[Tensor], device: Any) -> Tensor:
    """Return the tensors' addresses on the device.

    A kernel that has them as arguments writes them. The host does not wait, as it would for a copy.
    """
    addresses = torch.empty(len(tensors), dtype=torch.int64, device=device)
    launch(f"{_TE}copy_data_ptrs_to_device", memory("fill"), writes=[addresses])
    return addresses


def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data: Sequence[Tensor], scales: Sequence[Tensor], kind: str, device: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the addresses of weights, the addresses of their scales, and the scales' buffer.

    The buffer holds all scales in the tensor cores' order.
    """
    del kind  # how the scales are ordered
    sizes = [each.numel() * each.element_size() for each in scales]
    buffer = empty_as([sum(sizes)], torch.uint8)
    name = f"{_TE}swizzle_scales_of_discrete_weights"
    launch(name, memory("copy"), reads=scales, writes=[buffer])
    packed = buffer.split(sizes)
    of_data, of_scales = (copy_data_ptrs_to_device(tensors, device) for tensors in (data, packed))
    return of_data, of_scales, buffer


def get_device_pointer_for_data_and_scales(
    data: Sequence[Tensor],
    scales: Sequence[Tensor],
    swizzle: bool,
    rowwise: bool,
    data_dtype: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the addresses of weights, the addresses of their scales, and the scales' buffer.

    The scales stay where they are, and the buffer is empty, unless they are to be swizzled.
    """
    device = data[0].device
    if swizzle:
        return swizzle_scales_and_pack_ptrs_for_discrete_weights(data, scales, "", device)
    of_data, of_scales = (copy_data_ptrs_to_device(tensors, device) for tensors in (data, scales))
    return of_data, of_scales, empty_as([0], torch.uint8)


def convert_host_pointers_to_tensor(tensor_lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the addresses of each list's tensors on the device."""
    return [copy_data_ptrs_to_device(tensors, tensors[0].device) for tensors in tensor_lists]


FUNCTIONS = {
    "convert_host_pointers_to_tensor": convert_host_pointers_to_tensor,
    "copy_data_ptrs_to_device": copy_data_ptrs_to_device,
    "get_device_pointer_for_data_and_scales": get_device_pointer_for_data_and_scales,
    "grouped_mlp_experimental": SimpleNamespace(
        swizzle_scales_and_pack_ptrs_for_discrete_weights=(
            swizzle_scales_and_pack_ptrs_for_discrete_weights
        )
    ),
}
