"""``torchrun … llama_variants.py [variants] -- ARGS``: the llama example as a user would change it.

Each variant is a real change of the program, through torch's own interfaces. What-ifs on the
program without it are held against it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LLAMA = Path(__file__).parents[2] / "examples" / "llama"
sys.path.insert(0, str(LLAMA))

import parallel  # noqa: E402
import train  # noqa: E402

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def blocking(collective: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective on the stream where it is issued, in the way of the stream that computes."""
    computing, current = torch.cuda.default_stream(), torch.cuda.current_stream()
    current.wait_stream(computing)
    done = collective(*args, **kwargs)
    computing.wait_stream(current)
    return done


class BlockingAllGather(DefaultAllGather):
    """FSDP's, without overlap."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return blocking(super().__call__, *args, **kwargs)


class BlockingReduceScatter(DefaultReduceScatter):
    """FSDP's, without overlap."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return blocking(super().__call__, *args, **kwargs)


def blocking_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's ``allreduce_hook``, without overlap."""
    tensor = bucket.buffer().div_(group.size())
    dist.all_reduce(tensor, group=group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


# torch compares them with the types themselves, not with their names.
blocking_hook.__annotations__ = get_type_hints(blocking_hook)


def block_data_parallel(model: nn.Module) -> None:
    """Data-parallel communications of ``model`` block its computation."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(model.process_group, blocking_hook)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(BlockingAllGather())
            module.set_custom_reduce_scatter(BlockingReduceScatter())


def with_variants(options: argparse.Namespace) -> None:
    """Change the example's modules."""
    build_model, apply_fsdp = parallel.build_model, parallel.apply_fsdp

    def build(*args: Any, **kwargs: Any) -> nn.Module:
        model = build_model(*args, **kwargs)
        if options.blocking:
            block_data_parallel(model)
        elif isinstance(model, DistributedDataParallel):
            # What torch does without a hook, written as one: the same but for the blocking.
            model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
        return model

    def shard(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if options.checkpoint:
            for block in model.layers.values():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        apply_fsdp(model, *args, **kwargs)

    def tp_outermost(layout: Any, device_type: str) -> dict[str, DeviceMesh]:
        names = ("pp", "tp", "dp")
        shape = tuple(getattr(layout, name) for name in names)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        return {name: mesh[name] for name in names}

    parallel.build_model, parallel.apply_fsdp = build, shard
    if options.tp_outermost:
        train.build_mesh = tp_outermost


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=BACKENDS)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--tp-outermost", action="store_true")
    split = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:split])
    sys.argv = [sys.argv[0], *sys.argv[split + 1 :]]
    with_variants(options)
    with sdpa_kernel(BACKENDS[options.attention]) if options.attention else nullcontext():
        train.main()


if __name__ == "__main__":
    main()
