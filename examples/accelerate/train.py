"""Train a Llama from transformers with Hugging Face accelerate's FSDP2 plugin.

    torchrun --nproc-per-node 2 examples/accelerate/train.py --steps 5

The model is made from a configuration, the tokens are synthetic: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator, FullyShardedDataParallelPlugin


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences that can be drawn again."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self._shape = (samples, length)
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self._vocabulary, self._shape[1:], generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of one rank")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of one step")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--log-every", type=int, default=1, help="steps from line to line")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, keep fp32 shards")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--gather-loss", action="store_true", help="log the loss of all ranks")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 4,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            vocab_size=args.vocabulary,
            max_position_embeddings=args.seq_length,
            use_cache=False,
        )
    )


def main() -> None:
    """Train, and print a line per step on the first rank."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if args.bf16 else "no",
        gradient_accumulation_steps=args.accumulate,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing=args.checkpointing,
        ),
    )
    set_seed(0)
    model = build_model(args)
    samples = args.steps * args.accumulate * args.batch_size * accelerator.num_processes
    data = DataLoader(Tokens(samples, args.seq_length, args.vocabulary), batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

    model.train()
    step, start = 0, time.perf_counter()
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % args.log_every:
                continue
            shown = accelerator.gather(loss.detach()).mean() if args.gather_loss else loss.detach()
            seconds = (time.perf_counter() - start) / args.log_every
            accelerator.print(f"step {step:4d}  loss {shown.item():.4f}  {seconds:.4f} s")
            start = time.perf_counter()
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
        accelerator.print(f"peak {peak:.1f} MiB of rank {os.environ.get('RANK', '0')}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
