"""Fused attention against tables of measurements."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import FIELD
from prismscale.errors import UsageError
from prismscale.validation.kernels.attention_rows import load_attention
from prismscale.validation.kernels.attention_scores import validate
from prismscale.validation.kernels.held_out import HeldOut

HELD = "llama3.1,no_mask,4096"


def write(truth: Path, factor: float = 1.0) -> None:
    """cuDNN's forward pass on an H200, held out and not, ``factor`` times as long as modelled."""
    model = ModelledKernels(profile=KernelProfile.load("h200-sxm").burst())
    lines = ["gpu,backend,dtype,mask,batch,seqlen,q_heads,kv_heads,head_dim,pass,"]
    lines[0] += "deterministic_bwd,time_ms"
    for length, mask in ((4096, "no_mask"), (8192, "no_mask"), (4096, "top_left")):
        shape = f"BFloat16[2,32,{length},128]"
        name = "aten::_scaled_dot_product_cudnn_attention"
        causal = f"is_causal={int(mask == 'top_left')}"
        cost = model.cost(FIELD.join((name, ";".join([shape] * 3), shape, causal)))
        row = f"NVIDIA H200,cudnn,bfloat16,{mask},2,{length},32,32,128,fwd,False"
        lines.append(f"{row},{factor * cost.device_ns / 1e6}")
    path = truth / "cudnn_frontend" / "attention_training__mine.csv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")


def test_vectorised_attention_is_what_prices_calls(tmp_path: Path) -> None:
    """Tables are held against what the null device would charge, to the nanosecond."""
    write(tmp_path)
    (rows,) = load_attention(tmp_path)

    predicted = rows.predicted_ns(KernelProfile.load("h200-sxm"))

    assert np.abs(predicted - rows.time_ns).max() < 1
    assert rows.held_out.tolist() == [True, False, False]


def test_attention_is_scored_on_held_out_rows(tmp_path: Path) -> None:
    """Measurements twice as long: an error of half, of the one row that is held out."""
    write(tmp_path, factor=2.0)

    (median, *_) = validate(tmp_path)

    assert HeldOut.load().holds("cudnn_attention", HELD)
    assert median.name == "h200-sxm attention cudnn forward bfloat16 (1 rows): median error"
    assert median.value == pytest.approx(50, abs=0.1)
    assert not median.ok


def test_windows_and_other_libraries_have_no_table(tmp_path: Path) -> None:
    """A row with a window, and one of a kernel that no stand-in runs, are left out."""
    path = tmp_path / "aiconfigurator" / "h100_sxm__context_attention_perf__mine_1.0.csv.gz"
    path.parent.mkdir(parents=True)
    head = "kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype"
    lines = [f"{head},kv_cache_dtype,window_size,latency_ms"]
    for source, window in (("fa3", 0), ("fa3", 128), ("triton", 0)):
        lines.append(f"{source},1,1024,8,8,128,bfloat16,bfloat16,{window},0.1")
    path.write_bytes(gzip.compress("\n".join(lines).encode()))

    (rows,) = load_attention(tmp_path)

    assert rows.time_ns.tolist() == [1e5]


def test_a_folder_without_attention_is_refused(tmp_path: Path) -> None:
    """The message names a file that is expected."""
    with pytest.raises(UsageError, match="context_attention_perf"):
        load_attention(tmp_path)
