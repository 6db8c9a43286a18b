"""Initial weights that do not depend on the layout.

A weight is a function of the seed, its parameter's name and its position in the whole
parameter, so every layout starts from the same model and a rank computes only its shards.
"""

from __future__ import annotations

import math
import zlib

import torch
from model import Llama, rope_table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

_STD = 0.02
_RESIDUAL_OUTPUTS = ("attention.wo.weight", ".down.weight")


def materialize(model: Llama, device: torch.device, seed: int) -> None:
    """Give a meta model (sharded or not) storage on `device` and its initial weights."""
    config = model.config
    model.to_empty(device=device)
    model.rope = rope_table(model.rope.shape[1], config.head_dim, config.rope_theta, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(_local(parameter))
                continue
            # The residual is a sum over 2 × layers outputs: keep its variance at that of one.
            scale = math.sqrt(2 * config.layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
            noise = _uniform(_local_positions(parameter), key=zlib.crc32(f"{seed} {name}".encode()))
            _local(parameter).copy_(noise * (_STD / scale * math.sqrt(12)))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_positions(parameter: Tensor) -> Tensor:
    """Row-major position in the whole 2-D parameter of each element of this rank's shard."""
    rows, columns = parameter.shape
    row_index = torch.arange(rows, device=parameter.device).view(-1, 1)
    column_index = torch.arange(columns, device=parameter.device).view(1, -1)
    return _shard_like(parameter, row_index, dim=0) * columns + _shard_like(
        parameter, column_index, dim=1
    )


def _shard_like(parameter: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """This rank's part of `index` where `parameter` is sharded along `dim`; sends nothing."""
    if not isinstance(parameter, DTensor):
        return index
    placements = [
        p if getattr(p, "dim", None) == dim else Replicate() for p in parameter.placements
    ]
    return distribute_tensor(
        index, parameter.device_mesh, placements, src_data_rank=None
    ).to_local()


def _uniform(position: Tensor, *, key: int) -> Tensor:
    """Uniform values in [-0.5, 0.5) from integers, by the finaliser of MurmurHash3 (64 bit)."""
    bits = position + (key << 31)
    for multiplier in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        bits = (bits ^ (bits >> 33)) * multiplier
    return ((bits >> 20) & 0xFFFFFF) / 2.0**24 - 0.5
