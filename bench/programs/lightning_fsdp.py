"""Lightning's Trainer with its FSDP strategy: ``lightning_fsdp.py``."""

from __future__ import annotations

import os
import tempfile

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

LENGTH, WIDTH, VOCABULARY, LAYERS, BATCH = 512, 1024, 32_000, 8, 2
LOCAL = 8


class Tokens(Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)


class Model(lightning.LightningModule):
    """A decoder without cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, x.device, x.dtype)
        logits = self.head(self.layers(x, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Train for eight steps."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu",
            devices=LOCAL,
            num_nodes=int(os.environ["WORLD_SIZE"]) // LOCAL,
            strategy=FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}),
            precision="bf16-mixed",
            max_steps=8,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        trainer.fit(Model(), DataLoader(Tokens(), batch_size=BATCH))


if __name__ == "__main__":
    main()
