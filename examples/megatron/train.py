"""Train a GPT with megatron-core on synthetic tokens: TP, SP, PP, VPP, CP, EP, ZeRO-1.

    torchrun --nproc-per-node 8 examples/megatron/train.py --num-layers 12 --hidden-size 512 \\
        --num-attention-heads 8 --seq-length 1024 --micro-batch-size 4 --global-batch-size 32 \\
        --tensor-model-parallel-size 2 --bf16

Options are Megatron-LM's. Needs megatron-core 0.16 and CUDA devices.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from arguments import parse_args
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config
from model import build_chunks, build_optimizer, transformer_config
from torch import Tensor

Batch = dict[str, Tensor | None]
Report = Callable[[int, float, float | None], None]


def initialize(args: argparse.Namespace) -> None:
    """Process group, this rank's device, model-parallel groups, random states."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_stages,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size or None,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    torch.use_deterministic_algorithms(args.deterministic_mode)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        args.seed, use_cudagraphable_rng=args.cuda_graph_impl != "none"
    )


def samples(args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Microbatches in host memory, for ever; every data-parallel rank has its own tokens."""
    length, batch = args.seq_length, args.micro_batch_size
    generator = torch.Generator().manual_seed(
        args.seed + parallel_state.get_data_parallel_rank(with_context_parallel=False)
    )
    mask = torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, 1, length, length)
    while True:
        text = torch.randint(0, args.vocab_size, (batch, length + 1), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(batch, length),
            "attention_mask": mask.contiguous(),
            "position_ids": torch.arange(length).expand(batch, length).contiguous(),
        }


def next_batch(data: Iterator[dict[str, Tensor]]) -> Batch:
    """What this rank's pipeline stage needs of the next sample, on the device.

    The first rank of a tensor-parallel group reads it and broadcasts it to the others.
    """
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    names = ["tokens", "position_ids"] * first + ["labels", "loss_mask"] * last
    if not names:
        return dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask", "attention_mask"))
    sample = next(data)
    source = parallel_state.get_tensor_model_parallel_src_rank()
    batch: Batch = dict.fromkeys(sample)
    for name in [*names, "attention_mask"]:
        on_host = sample[name]
        if dist.get_rank() == source:
            batch[name] = on_host.cuda(non_blocking=True)
        else:
            batch[name] = torch.empty(on_host.shape, dtype=on_host.dtype, device="cuda")
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.broadcast(batch[name], source, group=group)
    return get_batch_on_this_cp_rank(batch)


def masked_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses that count, how many those are, and both for the log."""
    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    reported = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": reported}


def forward_step(
    data: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """One microbatch through one model chunk."""
    batch = next_batch(data)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])


class Trainer:
    """One rank's part of the job."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config: TransformerConfig = transformer_config(args)
        self.chunks = build_chunks(args, self.config)
        self.optimizer = build_optimizer(args, self.chunks)
        config = get_model_config(self.chunks[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_syncs[0] if len(no_syncs) == 1 else no_syncs
        # Each chunk reads its own stream of the same samples.
        self.data = [samples(args) for _ in self.chunks]

    def train_step(self) -> tuple[torch.Tensor | None, float | None]:
        """One optimizer step; sum and number of the losses where this rank has them, and the
        gradient norm."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self.data if len(self.chunks) > 1 else self.data[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.args.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            decoder_seq_length=self.args.seq_length,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None, grad_norm
        total = torch.stack([loss["lm loss"] for loss in losses]).sum(dim=0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(total, group=group)
        return total, grad_norm

    def train(self) -> None:
        """Run all steps; the last rank prints a line for each."""
        every = self.args.log_every
        start = time.perf_counter()
        for step in range(1, self.args.train_iters + 1):
            total, grad_norm = self.train_step()
            if step % every:
                continue
            loss = None if total is None else (total[0] / total[1]).item()
            torch.cuda.synchronize()
            if dist.get_rank() == dist.get_world_size() - 1:
                log_step(step, (time.perf_counter() - start) / every, loss, grad_norm)
            start = time.perf_counter()


def log_step(step: int, seconds: float, loss: float | None, grad_norm: float | None) -> None:
    """Time, loss and this rank's memory."""
    fields = [
        f"step {step:4d}",
        f"{seconds:.4f} s",
        "loss        -" if loss is None else f"loss {loss:.6f}",
        "grad norm -" if grad_norm is None else f"grad norm {grad_norm:.4f}",
        f"allocated {torch.cuda.memory_allocated()}",
        f"peak {torch.cuda.max_memory_allocated()}",
    ]
    print("  ".join(fields), flush=True)


def main() -> None:
    """Parse the command line, train, and leave the process group."""
    args = parse_args()
    initialize(args)
    Trainer(args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
