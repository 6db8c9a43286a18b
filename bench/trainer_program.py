"""A Hugging Face Trainer whose attention masks are all ones: ``trainer_program.py [--padded]``.

transformers asks a mask whether it is one of ones, and then gives attention none. ``--padded``
masks the last tokens of every sequence.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

LENGTH, VOCABULARY = 1024, 32_000


class Tokens(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.long)
        if "--padded" in sys.argv:
            mask[-7:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def main() -> None:
    """Train for eight steps."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=8,
            bf16=True,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
        )
        Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
