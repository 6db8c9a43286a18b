"""TRL's SFTTrainer on FSDP by Hugging Face's arguments: ``trl_sft.py [--optim adamw_8bit]``.

The model and the tokenizer are made here, the text too: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

LENGTH, VOCABULARY = 1024, 32_000


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<eos>", "<pad>"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def main() -> None:
    """Train for eight steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optim", default="adamw_torch_fused")
    options = parser.parse_args()
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
        )
    )
    text = [{"text": f"Line {i}. " + "The quick brown fox jumps. " * 60} for i in range(2048)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_length=LENGTH,
            per_device_train_batch_size=2,
            max_steps=8,
            bf16=True,
            optim=options.optim,
            gradient_checkpointing=True,
            fsdp="full_shard auto_wrap" if options.optim == "adamw_torch_fused" else "",
            fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            save_strategy="no",
            report_to=[],
        )
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(text),
            processing_class=byte_tokenizer(),
        )
        trainer.train()


if __name__ == "__main__":
    main()
