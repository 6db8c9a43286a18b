"""One rank of ``examples/megatron/train.py`` on a null H100, alone in this process.

    python bench/null_rank.py --rank R --world-size N [--memory-gib G] -- OPTIONS OF THE EXAMPLE

Transformer Engine and FlashAttention, where they are installed, run over prismscale's stand-ins;
Apex's kernels are there in any case (``apex_package.py``). Prints ``peaks`` and the peak allocated
bytes since the start after each step.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import apex_package
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.runtime import activate
from prismscale.emulation.hook import Collective
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.emulation.work import EmulatedWork
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "megatron"


class MirrorHook:
    """Peers do what this rank does; tensors are held until somebody waits, as NCCL holds them."""

    def __init__(self) -> None:
        self._payload = MirrorPayload()

    def communicate(self, batch: Sequence[Collective]) -> EmulatedWork:
        """Fill at once."""
        held = [tensor for one in batch for tensor in (*one.inputs, *one.outputs)]
        for one in batch:
            self._payload.fill(one)
        outputs = [tensor for one in batch for tensor in one.outputs]
        return EmulatedWork(outputs, lambda _: held.clear())


def run_rank(
    options: Sequence[str],
    *,
    rank: int,
    world_size: int,
    memory_gib: int | None = None,
) -> list[int]:
    """Peak allocated bytes since the start, after each step."""
    warnings.filterwarnings("ignore")  # megatron-core's, about what is not installed
    spec = device_spec("h100-sxm")
    runtime = activate(replace(spec, total_memory_bytes=memory_gib << 30) if memory_gib else spec)
    apex_package.install(runtime.stand_ins)
    sys.path.insert(0, str(EXAMPLE))
    sys.argv = ["train.py", *options]
    peaks = []
    with absent_peers(RankEnvironment(rank=rank, world_size=world_size), MirrorHook()):
        import train

        args = train.parse_args()
        train.initialize(args)
        trainer = train.Trainer(args)
        for _ in range(args.train_iters):
            trainer.train_step()
            peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def main() -> int:
    """Run the rank that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--memory-gib", type=int, default=0, help="0: the GPU's own")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    peaks = run_rank(
        options.rest,
        rank=options.rank,
        world_size=options.world_size,
        memory_gib=options.memory_gib or None,
    )
    print("peaks", *peaks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
