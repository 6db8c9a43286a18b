"""Configurations for torchtitan 0.3.0 (``--module titan_configs``) that its own registry lacks."""

from __future__ import annotations

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry as registry
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from titan_2024 import as_of_2024


def llama3_8b_whole_loss() -> Trainer.Config:
    """8B as torchtitan was at the end of 2024: the loss over all logits at once, eager."""
    config = registry.llama3_8b()
    config.model_spec = model_registry("8B")
    config.loss = CrossEntropyLoss.Config(
        global_vocab_size=decoder_vocab_size(config.model_spec),
    )
    return config


def llama3_8b_2024() -> Trainer.Config:
    """8B with the operators that torchtitan had then: what its published throughput measured."""
    config = llama3_8b_whole_loss()
    as_of_2024(config.model_spec)
    return config


def llama3_8b_checkpointed() -> Trainer.Config:
    """8B whose every layer is computed again in the backward pass."""
    config = llama3_8b_whole_loss()
    config.activation_checkpoint = FullAC.Config()
    return config


def llama3_8b_selective() -> Trainer.Config:
    """8B that computes again what is cheap."""
    config = llama3_8b_whole_loss()
    config.activation_checkpoint = SelectiveAC.Config()
    return config


def llama3_8b_kept() -> Trainer.Config:
    """8B that keeps all activations."""
    config = llama3_8b_whole_loss()
    config.activation_checkpoint = None
    return config


def llama3_8b() -> Trainer.Config:
    """8B as torchtitan has it."""
    return registry.llama3_8b()


def llama3_70b() -> Trainer.Config:
    """70B as torchtitan has it."""
    return registry.llama3_70b()


def llama3_405b_bf16() -> Trainer.Config:
    """405B in bf16, eager. Torchtitan's own has float8, and asks for torchao; the 70B has the rest:
    the loss in chunks, full checkpointing, tensor-parallel degree 8."""
    config = registry.llama3_70b()
    config.model_spec = model_registry("405B")
    return config
