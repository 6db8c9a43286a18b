"""FullyShardedDataParallel, torch's first, with mixed precision: ``fsdp1.py``."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

LENGTH, WIDTH, VOCABULARY, LAYERS, BATCH = 1024, 1024, 32_000, 8, 2


class Model(nn.Module):
    """A decoder without cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = (
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main() -> None:
    """Train for eight steps."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layers = {nn.TransformerEncoderLayer}
    model = FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=layers
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(8):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
