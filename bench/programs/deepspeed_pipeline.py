"""DeepSpeed's pipeline over blocks of a transformer.

    deepspeed_pipeline.py [--stages 4] [--zero 1] [--fused-adam]

Layers are made where their stage is, the loss on the last; tokens are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import deepspeed

LENGTH, WIDTH, VOCABULARY, LAYERS = 512, 512, 8_192, 8
MICRO_BATCH = 2


class Block(nn.TransformerEncoderLayer):
    """One layer with a causal mask."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        causal = nn.Transformer.generate_square_subsequent_mask
        mask = causal(LENGTH, device=x.device, dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens, for ever."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH), generator=generator)
        yield tokens, tokens


def main() -> None:
    """Train for eight steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--zero", type=int, choices=(0, 1), default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--fused-adam", action="store_true", help="DeepSpeed's own")
    options = parser.parse_args()
    deepspeed.init_distributed()
    specs = [
        LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
        *(LayerSpec(Block) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False),
    ]
    model = PipelineModule(
        layers=specs, num_stages=options.stages, loss_fn=loss, partition_method="parameters"
    )
    make = FusedAdam if options.fused_adam else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": options.accumulate,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": options.zero},
        },
    )
    data = batches()
    for _ in range(8):
        engine.train_batch(data_iter=data)


if __name__ == "__main__":
    main()
