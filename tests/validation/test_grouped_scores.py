"""Products of experts against tables of measurements."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.kernel_gemm import products_of
from prismscale.cost.kernel_signature import parse_signature
from prismscale.errors import UsageError
from prismscale.validation.kernels.grouped_rows import load_grouped
from prismscale.validation.kernels.grouped_scores import validate

WGRAD = (
    "ng=8, M=1024, N=3072, K=5120, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32, "
    "stage=bwd_grad_w, grad=True, accumulate=True, use_split_accumulator=True, single_output=False"
)
HEAD = "kernel_source,moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size"


def write_simumax(truth: Path, share: float) -> None:
    """One gradient of weights."""
    path = truth / "simumax_b200" / "measured_operators.json"
    path.parent.mkdir(parents=True)
    about = {"group_matmul": {"accurate_efficient_factor": {WGRAD: share}}}
    path.write_text(json.dumps({"accelerator": {"op": about}}))


def test_gradients_of_experts_are_added_to_what_is_there(tmp_path: Path) -> None:
    """Eight products N × K over M; main gradients of 32 bits are read and written."""
    write_simumax(tmp_path, 0.5)

    (row,) = load_grouped(tmp_path)
    seen = parse_signature(row.signatures[0])

    assert [(p.m, p.n, p.k) for p in products_of(seen)] == [(3072, 5120, 1024)] * 8
    assert seen.inputs[-1].n_bytes == seen.outputs[0].n_bytes == 4 * 8 * 3072 * 5120
    assert row.time_ns == pytest.approx(2e9 * 8 * 1024 * 3072 * 5120 / (0.5 * 2250e12))


def test_experts_are_scored_at_speeds_that_last(tmp_path: Path) -> None:
    """A measurement as long as the null device would charge has no error."""
    write_simumax(tmp_path, 0.5)
    (row,) = load_grouped(tmp_path)
    charged = load_kernel_model("b200").cost(row.signatures[0]).device_ns
    (tmp_path / "simumax_b200" / "measured_operators.json").unlink()
    (tmp_path / "simumax_b200").rmdir()
    write_simumax(tmp_path, 0.5 * row.time_ns / charged)

    median, *_ = validate(tmp_path)

    assert median.name == "b200 experts wgrad, Transformer Engine, balanced (1 rows): median error"
    assert median.value == pytest.approx(0, abs=0.01)


def test_a_layer_of_experts_on_one_gpu_is_two_grouped_products(tmp_path: Path) -> None:
    """Rows of ranks of an expert-parallel group do not say what the rank was given."""
    path = tmp_path / "aiconfigurator" / "h100_sxm__moe_perf__mine_1.0.csv.gz"
    path.parent.mkdir(parents=True)
    layer = "triton,bfloat16,4096,2048,768,8,128,1"
    rows = [f"{layer},1,balanced,1.5", f"{layer},8,balanced,1.5", f"{layer},1,power_law_1.2,2"]
    text = "\n".join((f"{HEAD},moe_ep_size,distribution,latency_ms", *rows))
    path.write_bytes(gzip.compress(text.encode()))

    even, uneven = load_grouped(tmp_path)
    up, _, down, total = (parse_signature(s) for s in even.signatures)

    assert (even.is_even, uneven.is_even) == (True, False)
    assert even.rows == 256
    assert [(p.batch, p.m, p.n, p.k) for p in products_of(up)] == [(128, 256, 1536, 2048)]
    assert [(p.batch, p.m, p.n, p.k) for p in products_of(down)] == [(128, 256, 2048, 768)]
    assert (total.inputs[0].sizes, total.outputs[0].sizes) == ((4096, 8, 2048), (4096, 2048))


def test_a_folder_without_experts_is_refused(tmp_path: Path) -> None:
    """The message names files that are expected."""
    with pytest.raises(UsageError, match="moe_perf"):
        load_grouped(tmp_path)
