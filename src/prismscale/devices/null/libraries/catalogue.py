"""List of all stand-ins that come with prismscale."""

from __future__ import annotations

from prismscale.devices.null.libraries import (
    apex,
    bitsandbytes,
    causal_conv1d,
    cudnn_frontend,
    deep_ep,
    deepspeed_ops,
    grouped_gemm,
    mamba_ssm,
    transformer_engine,
)
from prismscale.devices.null.libraries.flash_attention import flash_attention_2, flash_attention_3
from prismscale.devices.null.libraries.stand_in import StandIn


def stand_ins() -> tuple[StandIn, ...]:
    """Return the stand-ins that come with prismscale."""
    return (
        transformer_engine.stand_in(),
        apex.stand_in(),
        flash_attention_2.stand_in(),
        flash_attention_3.stand_in(),
        grouped_gemm.stand_in(),
        mamba_ssm.stand_in(),
        causal_conv1d.stand_in(),
        bitsandbytes.stand_in(),
        deepspeed_ops.stand_in(),
        deep_ep.stand_in(),
        cudnn_frontend.stand_in(),
    )
