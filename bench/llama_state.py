"""``examples/llama/train.py``, which says at its end what this rank keeps: ``state PARAMETERS
OPTIMIZER``, in bytes of storage."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llama"))

import train
from config import parse_args
from parallel import build_mesh


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of this rank's shards, each storage once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in local}
    return sum(storage.nbytes() for storage in storages.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Everything that the optimizer keeps of its parameters."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


config = parse_args()
device = train.init_device(config.device)
trainer = train.Trainer(config, build_mesh(config.layout, device.type), device)
try:
    trainer.train()
finally:
    parameters = chain(*trainer.parameter_groups)
    kept = (storage_bytes(parameters), storage_bytes(optimizer_tensors(trainer.optimizer)))
    print("state", *kept, flush=True)
