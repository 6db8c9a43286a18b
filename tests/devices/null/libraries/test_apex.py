"""Apex and grouped_gemm: what their extensions allocate, write, and are costed as."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null.libraries import apex, grouped_gemm
from prismscale.devices.null.runtime import active

BF16 = torch.bfloat16
EXTENSIONS = apex.stand_in().modules


def _empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def _extents(kernel: str) -> list[tuple[int, ...]]:
    """Of all calls of ``kernel`` so far."""
    library = active().library
    texts = [library.ps_signature(i).decode() for i in range(library.ps_signature_count())]
    arguments = [text.rpartition("extents=")[2] for text in texts if text.startswith(kernel)]
    return [tuple(map(int, text.partition(";")[0].split(","))) for text in arguments]


def test_a_norm_of_16_bits_keeps_statistics_of_32() -> None:
    """Mixed types give an output of the weight's type."""
    norms: Any = EXTENSIONS["fused_layer_norm_cuda"]()
    x, weight = _empty(64, 2, 512), _empty(512)
    out, mean, deviation = norms.forward_affine(x, (512,), weight, weight, 1e-5)
    assert (out.dtype, mean.dtype, deviation.shape) == (BF16, torch.float32, (128,))
    wide = weight.float()
    out, _ = norms.rms_forward_affine_mixed_dtypes(x, (512,), wide, 1e-5)
    assert out.dtype == torch.float32


def test_gradients_of_weights_are_summed_in_16_rows() -> None:
    """Which are given back."""
    norms: Any = EXTENSIONS["fused_layer_norm_cuda"]()
    x, weight, rows = _empty(128, 512), _empty(512), _empty(128, dtype=torch.float32)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = norms.backward_affine(x, rows, rows, x, (512,), weight, weight, 1e-5, False)
    assert [grad.shape for grad in grads] == [x.shape, weight.shape, weight.shape]
    kept = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before == kept + 2 * 16 * 512 * 4
    alone = norms.backward(x, rows, rows, x, (512,), 1e-5, False)
    assert alone.shape == x.shape


@pytest.mark.parametrize(
    "extension", ["scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"]
)
def test_the_gradient_of_a_softmax_takes_no_memory(extension: str) -> None:
    """It goes where the gradient of the probabilities was."""
    softmax: Any = EXTENSIONS[extension]()
    scores, mask = _empty(2, 4, 128, 128), _empty(2, 1, 128, 128, dtype=torch.bool)
    given = (mask,) if "scaled_masked" in extension else ()
    probabilities = softmax.forward(scores, *given, 0.5)
    assert probabilities.data_ptr() != scores.data_ptr()
    grad = _empty(2, 4, 128, 128)
    assert softmax.backward(grad, probabilities, 0.5) is grad


def test_weight_gradients_are_added_to_the_buffer() -> None:
    """As one product, whose inner dimension are the tokens."""
    kernels: Any = EXTENSIONS["fused_weight_gradient_mlp_cuda"]()
    x, grad, total = _empty(256, 2, 64), _empty(256, 2, 96), _empty(96, 64, dtype=torch.float32)
    before = torch.cuda.memory_allocated()
    kernels.wgrad_gemm_accum_fp32(x, grad, total)
    assert torch.cuda.memory_allocated() == before
    assert _extents("apex::wgrad_gemm_accum_fp32.gemm") == [(1, 96, 64, 512)]


def test_experts_of_as_many_rows_are_one_batch() -> None:
    """Those without rows do nothing; rows on the device are shared out evenly."""
    (make,) = grouped_gemm.stand_in().modules.values()
    backend: Any = make()
    rows, weights, out = _empty(192, 64), _empty(4, 64, 32), _empty(192, 32)
    backend.gmm(rows, weights, out, torch.tensor([64, 64, 0, 64]), False, False)
    backend.gmm(rows, weights, out, torch.tensor([48, 48, 48, 48], device="cuda"), False, False)
    assert _extents("grouped_gemm::gmm.gemm") == [(3, 64, 32, 64), (4, 48, 32, 64)]
    library, model = active().library, load_kernel_model("h100-sxm")
    texts = [library.ps_signature(i).decode() for i in range(library.ps_signature_count())]
    kinds = {model.cost(text).kind for text in texts if text.startswith("grouped_gemm::gmm")}
    assert kinds == {"gemm"}
