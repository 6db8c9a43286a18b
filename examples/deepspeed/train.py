"""Train a Llama from transformers with DeepSpeed's ZeRO.

    torchrun --nproc-per-node 2 examples/deepspeed/train.py --zero 3 --steps 5

The model is made from a configuration, the tokens are synthetic: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time

import torch
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of one rank")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of one step")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--log-every", type=int, default=1, help="steps from line to line")
    parser.add_argument("--fp32", action="store_true", help="train in fp32 instead of bf16")
    parser.add_argument("--bucket", type=float, default=5e8, help="gradients reduced at once")
    parser.add_argument("--local_rank", type=int, default=0, help="given by DeepSpeed's launcher")
    return parser.parse_args()


def zero_config(args: argparse.Namespace) -> dict[str, object]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not args.fp32},
        "zero_optimization": {"stage": args.zero, "reduce_bucket_size": int(args.bucket)},
    }


def build_model(args: argparse.Namespace, config: dict[str, object]) -> LlamaForCausalLM:
    """A Llama with random weights; with ZeRO-3 each parameter is sharded where it is made."""
    shape = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.seq_length,
        use_cache=False,
    )
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.zero == 3):
        return LlamaForCausalLM(shape)


def main() -> None:
    """Train, and print a line per step on the first rank."""
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = zero_config(args)
    model = build_model(args, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(engine.global_rank)
    shape = (args.batch_size, args.seq_length)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        for _ in range(args.accumulate):
            tokens = torch.randint(0, args.vocabulary, shape, generator=generator)
            tokens = tokens.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if step % args.log_every == 0:
            if engine.global_rank == 0:
                log_step(step, loss, (time.perf_counter() - start) / args.log_every)
            start = time.perf_counter()
    engine.destroy()


def log_step(step: int, loss: torch.Tensor, seconds: float) -> None:
    """Loss, time, and this rank's memory between two steps and at its peak."""
    device = get_accelerator()
    print(
        f"step {step:4d}  loss {loss.item():.4f}  {seconds:.4f} s  "
        f"allocated {device.memory_allocated()}  peak {device.max_memory_allocated()}",
        flush=True,
    )


if __name__ == "__main__":
    main()
