"""A program that calls the kernels of Llama-3, Qwen3-MoE and others over their shapes, once a step.

    prismscale run --device null --world-size 1 --out RUN bench/gpu/shapes.py
    prismscale profile-kernels RUN --out kernels.json      # on a GPU

Its captured signatures are the kernel profile of the GPU agenda: products forward, dgrad and wgrad
in bf16 and fp8, attention by implementation, norms, losses, elementwise, optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16
WIDTHS = {"8b": (4096, 14336, 1024), "70b": (8192, 28672, 1024), "405b": (16384, 53248, 1024)}
"""Hidden size, width of the feed-forward layer, width of keys."""
SPLITS = (1, 2, 4, 8)
TOKENS = (1024, 4096, 8192)
GROUPED = ((16, 2048, 768), (64, 2048, 768), (8, 4096, 1536))
"""Local experts, hidden size, width of an expert."""
HEADS = ((32, 8, 128), (8, 1, 128), (16, 16, 128), (32, 8, 64), (16, 16, 64))
LENGTHS = (1024, 4096, 8192)
FLOATS = (1, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


def new(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor on the GPU."""
    return torch.empty(sizes, dtype=dtype, device="cuda")


def products() -> Iterator[tuple[int, int, int]]:
    """M, N and K of the forward products."""
    for hidden, ffn, keys in WIDTHS.values():
        for tp in SPLITS:
            for tokens in TOKENS:
                yield tokens, (hidden + 2 * keys) // tp, hidden
                yield tokens, hidden, hidden // tp
                yield tokens, 2 * ffn // tp, hidden
                yield tokens, hidden, ffn // tp
    yield from ((4096, 128256 // tp, 4096) for tp in SPLITS)
    yield from ((n, n, n) for n in (256, 512, 1024, 2048, 3072, 6144, 8192))


def multiply() -> None:
    """Forward, gradient of the input, gradient of the weight; in fp8 the forward alone."""
    for m, n, k in dict.fromkeys(products()):
        x, weight, gradient = new(m, k), new(n, k), new(m, n)
        x @ weight.t()
        gradient @ weight
        gradient.t() @ x
        del gradient
        x8, w8 = new(m, k, dtype=torch.float8_e4m3fn), new(n, k, dtype=torch.float8_e4m3fn)
        scale = new(1, dtype=torch.float32)
        torch._scaled_mm(x8, w8.t(), scale, scale, out_dtype=BF16, use_fast_accum=True)
    for n in (1024, 4096):
        new(n, n, dtype=torch.float32) @ new(n, n, dtype=torch.float32)
        new(n, n, dtype=torch.float16) @ new(n, n, dtype=torch.float16)


def multiply_experts() -> None:
    """Grouped products of a mixture of experts, evenly routed."""
    for experts, hidden, width in GROUPED:
        for rows in (8192, 32768):
            ends = torch.zeros(experts, dtype=torch.int32, device="cuda")
            x, up = new(rows, hidden), new(experts, hidden, width)
            torch._grouped_mm(x, up, offs=ends)
            torch._grouped_mm(new(rows, width), up.transpose(-2, -1), offs=ends)
            torch._grouped_mm(x.t(), new(rows, width), offs=ends)


def attend() -> None:
    """Causal and not, forward and backward, by implementation."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for heads, keys, size in HEADS:
            for length in LENGTHS:
                for causal in (True, False):
                    if not causal and (heads, length) != (32, 4096):
                        continue
                    _attend(backend, heads, keys, size, length, causal=causal)
    _attend(SDPBackend.EFFICIENT_ATTENTION, 16, 16, 128, 4096, causal=True)


def _attend(
    backend: SDPBackend, heads: int, keys: int, size: int, length: int, *, causal: bool
) -> None:
    def rows(n: int) -> Tensor:
        return new(1, length, n, size).transpose(1, 2).requires_grad_()

    q, k, v = rows(heads), rows(keys), rows(keys)
    with sdpa_kernel(backend):
        grouped = heads != keys
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def normalize() -> None:
    """Norms, softmax and losses, forward and backward."""
    for width in (2048, 4096, 8192, 16384):
        for rows in (1024, 8192):
            x = new(rows, width).requires_grad_()
            weight = new(width).requires_grad_()
            for out in (F.rms_norm(x, (width,), weight), F.layer_norm(x, (width,), weight)):
                torch.autograd.grad(out, (x, weight), torch.empty_like(out))
    for vocabulary in (32000, 128256):
        for dtype in (BF16, torch.float32):
            logits = new(4096, vocabulary, dtype=dtype).requires_grad_()
            target = torch.zeros(4096, dtype=torch.long, device="cuda")
            torch.autograd.grad(F.cross_entropy(logits, target), logits)
    for width in (4096, 8192):
        table, tokens = new(128256, width).requires_grad_(), torch.zeros(1, 8192, dtype=torch.long)
        out = F.embedding(tokens.cuda(), table)
        torch.autograd.grad(out, table, torch.empty_like(out))


def work_on_elements() -> None:
    """Copies, casts, sums, activations and reductions from one element to 256 Mi."""
    for n in FLOATS:
        x, y = new(n), new(n, dtype=torch.float32)
        x + x
        x.add_(x)
        y.mul_(2)
        y.bfloat16()
        x.float()
        F.silu(x)
        y.zero_()
        x.copy_(x.clone())
        y.sum()
        torch.cat((x, x))
    for rows, width in ((8192, 4096), (8192, 14336), (1024, 8192)):
        x = new(rows, width)
        x.t().contiguous()
        x.sum(0)
        x.sum(1)
        x * x[:, :1]
        F.gelu(x)
        torch.nn.functional.dropout(x, 0.1)


def optimizers() -> list[torch.optim.Optimizer]:
    """Fused and foreach updates of many parameters."""
    made: list[torch.optim.Optimizer] = []
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        for n, width, options in (
            (16, 4096, {"fused": True}),
            (16, 4096, {"foreach": True}),
            (64, 256, {"foreach": True}),
        ):
            weights = [torch.nn.Parameter(new(width, width, dtype=torch.float32)) for _ in range(n)]
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            made.append(kind(weights, lr=1e-3, **options))
    return made


def main() -> None:
    """Everything, several times: a step ends where the optimizers have all been called."""
    steps = optimizers()
    for _ in range(6):
        with torch.no_grad():
            multiply()
            multiply_experts()
            work_on_elements()
        attend()
        normalize()
        gradients = [new(4096, 1024, dtype=torch.float32) for _ in range(64)]
        torch.nn.utils.get_total_norm(gradients)
        for optimizer in steps:
            optimizer.step()


if __name__ == "__main__":
    main()
