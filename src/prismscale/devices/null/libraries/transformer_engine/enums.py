"""Enumerations of ``transformer_engine_torch`` with the values of its headers.

Source: transformer_engine/common/include (transformer_engine.h, fused_attn.h, comm_gemm_overlap.h)
and common/util/pybind_helper.h of Transformer Engine 2.x.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from prismscale.devices.null.libraries.transformer_engine.versions import is_since

_int_enum: Any = IntEnum  # mypy knows only members that are written out


class DType(IntEnum):
    """Element types that the extension exports."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}

NVTE_Bias_Type: Any = _int_enum(
    "NVTE_Bias_Type",
    ["NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"],
    start=0,
)
NVTE_Mask_Type: Any = _int_enum(
    "NVTE_Mask_Type",
    [
        "NVTE_NO_MASK",
        "NVTE_PADDING_MASK",
        "NVTE_CAUSAL_MASK",
        "NVTE_PADDING_CAUSAL_MASK",
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK",
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ],
    start=0,
)
NVTE_Softmax_Type: Any = _int_enum(
    "NVTE_Softmax_Type",
    ["NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"],
    start=0,
)
NVTE_QKV_Format: Any = _int_enum(
    "NVTE_QKV_Format",
    [
        "NVTE_SBHD",
        "NVTE_BSHD",
        "NVTE_THD",
        "NVTE_BSHD_2SBHD",
        "NVTE_SBHD_2BSHD",
        "NVTE_THD_2BSHD",
        "NVTE_THD_2SBHD",
        "NVTE_BHSD",
        "NVTE_QKV_Format_NOT_SET",
    ],
    start=0,
)
_LAYOUTS = """
    SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D
    BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD
    THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD
    Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD
    BHSD_BHSD_BHSD QKV_Layout_NOT_SET
"""
NVTE_QKV_Layout: Any = _int_enum(
    "NVTE_QKV_Layout", [f"NVTE_{layout}" for layout in _LAYOUTS.split()], start=0
)
_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
if not is_since(2, 16):
    _BACKENDS["NVTE_F16_max512_seqlen"] = 0
NVTE_Fused_Attn_Backend: Any = _int_enum("NVTE_Fused_Attn_Backend", _BACKENDS)
Float8BlockScaleTensorFormat: Any = _int_enum(
    "Float8BlockScaleTensorFormat", ["GEMM_READY", "COMPACT"], start=0
)
NVTERoutingMapFormat: Any = _int_enum("NVTERoutingMapFormat", ["BYTEMAP", "BITMAP_U8"], start=0)
NVTEQBHistogramMode: Any = _int_enum("NVTEQBHistogramMode", ["TWO_KERNEL", "FUSED_ATOMIC"], start=0)
NVTEScalingMode: Any = _int_enum(
    "NVTEScalingMode",
    [
        "NVTE_DELAYED_TENSOR_SCALING",
        "NVTE_MXFP8_1D_SCALING",
        "NVTE_BLOCK_SCALING_1D",
        "NVTE_BLOCK_SCALING_2D",
        "NVTE_NVFP4_1D_SCALING",
    ],
    start=0,
)
CommOverlapType: Any = _int_enum("CommOverlapType", ["RS", "AG"], start=0)
CommOverlapAlgo: Any = _int_enum(
    "CommOverlapAlgo",
    [
        "BULK_OVERLAP_AG",
        "BULK_OVERLAP_RS",
        "SPLIT_PIPELINED_AG_P2P",
        "SPLIT_PIPELINED_RS",
        "SPLIT_PIPELINED_RS_P2P",
        "ATOMIC_GEMM_RS",
        "ATOMIC_GEMM_AG_P2P",
        "ATOMIC_GEMM_RS_P2P",
        "EXTERNAL_BULK_OVERLAP_AG",
    ],
    start=0,
)
FP8FwdTensors: Any = _int_enum(
    "FP8FwdTensors",
    [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors: Any = _int_enum(
    "FP8BwdTensors",
    [f"{what}{i}" for i in (1, 2, 3) for what in ("GRAD_OUTPUT", "GRAD_INPUT")],
    start=0,
)

ENUMS = (
    DType,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Fused_Attn_Backend,
    Float8BlockScaleTensorFormat,
    NVTERoutingMapFormat,
    NVTEQBHistogramMode,
    NVTEScalingMode,
    CommOverlapType,
    CommOverlapAlgo,
    FP8FwdTensors,
    FP8BwdTensors,
)


def formats_of(layout: Any) -> tuple[str, str]:
    """Return the formats (such as ``sbhd``) of queries, and of keys and values, in a layout."""
    name = NVTE_QKV_Layout(int(layout)).name.lower().removeprefix("nvte_").removeprefix("paged_kv_")
    parts = [part.replace("3", "").replace("2", "") for part in name.split("_")]
    return parts[0], parts[-1]


def torch_dtype(dtype: int) -> torch.dtype:
    """Return the torch type of a :class:`DType`."""
    return TORCH_DTYPES[DType(int(dtype))]
