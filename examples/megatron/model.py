"""Model chunks, gradient buffers and optimizer of one rank, from megatron-core."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_APEX,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

# megatron-core 0.16.1 asks whether this is None, but defines it only with Transformer Engine.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


def parameter_dtype(args: argparse.Namespace) -> torch.dtype:
    """What weights are computed with."""
    if args.fp16:
        return torch.float16
    return torch.bfloat16 if args.bf16 else torch.float32


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """megatron-core's configuration, with Megatron-LM's defaults for what options leave open."""
    optional = {
        "ffn_hidden_size": args.ffn_hidden_size,
        "kv_channels": args.kv_channels,
        "num_query_groups": args.num_query_groups if args.group_query_attention else 0,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "num_moe_experts": args.num_experts,
    }
    if args.recompute_granularity == "full":
        optional |= {
            "recompute_method": args.recompute_method,
            "recompute_num_layers": args.recompute_num_layers,
        }
    if args.recompute_granularity != "none":
        optional["recompute_granularity"] = args.recompute_granularity
    if args.swiglu:
        optional |= {"activation_func": F.silu, "gated_linear_unit": True}
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        normalization=args.normalization,
        add_bias_linear=not args.disable_bias_linear,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        init_method_std=args.init_method_std,
        apply_query_key_layer_scaling=args.apply_query_key_layer_scaling,
        attention_softmax_in_fp32=args.apply_query_key_layer_scaling,
        attention_backend=AttnBackend[args.attention_backend],
        masked_softmax_fusion=not args.no_masked_softmax_fusion,
        bias_activation_fusion=_fuses_activation(args),
        bias_dropout_fusion=True,
        apply_rope_fusion=_fuses_rotary(args),
        persist_layer_norm=HAVE_APEX and args.normalization == "LayerNorm",
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=parameter_dtype(args),
        pipeline_dtype=parameter_dtype(args),
        overlap_p2p_comm=args.virtual_stages is not None,
        batch_p2p_comm=args.virtual_stages is None,
        cuda_graph_impl=args.cuda_graph_impl,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_stages,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
        deterministic_mode=args.deterministic_mode,
        gradient_accumulation_fusion=_adds_weight_gradients(args),
        deallocate_pipeline_outputs=True,
        moe_router_topk=args.moe_router_topk,
        moe_router_load_balancing_type=args.moe_router_load_balancing_type,
        moe_grouped_gemm=args.moe_grouped_gemm,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        **{name: value for name, value in optional.items() if value},
    )


def _fuses_activation(args: argparse.Namespace) -> bool:
    if args.swiglu:
        return not args.no_bias_swiglu_fusion
    return not (args.no_bias_gelu_fusion or args.disable_bias_linear)


def _adds_weight_gradients(args: argparse.Namespace) -> bool:
    """Into the gradient buffer, by the product itself; Apex has such a kernel for local layers."""
    return layers._grad_accum_fusion_available and not args.no_gradient_accumulation_fusion


def _fuses_rotary(args: argparse.Namespace) -> bool:
    """Only Transformer Engine has such a kernel."""
    has_kernel = rope_utils.fused_apply_rotary_pos_emb is not None
    return args.position_embedding_type == "rope" and has_kernel and not args.no_rope_fusion


def build_chunks(args: argparse.Namespace, config: TransformerConfig) -> list[torch.nn.Module]:
    """This rank's model chunks (one unless the pipeline is interleaved), with gradient buffers."""
    stages = range(args.virtual_stages) if args.virtual_stages else (None,)
    chunks: list[torch.nn.Module] = [_chunk(args, config, stage).cuda() for stage in stages]
    if args.fp16 or args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16 or args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=not args.no_check_for_nan_in_loss_and_grad,
    )
    return [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            # Only the first chunk's backward, which comes last, has nothing to hide buckets behind.
            disable_bucketing=i > 0,
        )
        for i, chunk in enumerate(chunks)
    ]


def _chunk(args: argparse.Namespace, config: TransformerConfig, stage: int | None) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=stage,
    )


def _layer_spec(args: argparse.Namespace) -> ModuleSpec:
    experts = args.num_experts or None
    if args.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(experts, args.moe_grouped_gemm)
    return get_gpt_layer_local_spec(
        experts, args.moe_grouped_gemm, normalization=args.normalization
    )


def build_optimizer(args: argparse.Namespace, chunks: list[torch.nn.Module]) -> MegatronOptimizer:
    """Adam over this rank's parameters, sharded over data-parallel ranks where asked for."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=0.0,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=parameter_dtype(args),
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
        log_num_zeros_in_grad=args.log_num_zeros_in_grad,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
