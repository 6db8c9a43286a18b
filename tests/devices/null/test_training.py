"""A Llama block trains on the null device as it would on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import op_log


class Block(nn.Module):
    """One decoder layer: RMSNorm, grouped-query attention, SwiGLU."""

    def __init__(self, dim: int = 256, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, dim + 2 * kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.gate = nn.Linear(dim, 704, bias=False), nn.Linear(dim, 704, bias=False)
        self.down = nn.Linear(704, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def train_step(dtype: torch.dtype, autocast: bool, **adam: bool) -> tuple[nn.Module, op_log.OpLog]:
    """One step of a block and a head; returns the model and the ops of the step."""
    model = nn.Sequential(nn.Embedding(512, 256), Block(), nn.Linear(256, 512)).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **adam)
    tokens = torch.randint(0, 512, (2, 128)).cuda()
    op_log.drain_ops()
    op_log.record_ops()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    op_log.record_ops(False)
    return model, op_log.drain_ops()


@pytest.mark.parametrize("adam", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_step_gives_every_parameter_a_gradient(dtype, autocast, adam) -> None:
    """Forward, backward, clipping and AdamW run; gradients have their parameters' metadata."""
    model, _ = train_step(dtype, autocast, **adam)

    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.device == parameter.device


def test_attention_is_one_kernel_each_way() -> None:
    """bf16 attention on Hopper takes cuDNN's forward and backward."""
    _, log = train_step(torch.bfloat16, False, fused=True)
    names = [record.signature.name for record in log]

    assert names.count("aten::_scaled_dot_product_cudnn_attention") == 1
    assert names.count("aten::_scaled_dot_product_cudnn_attention_backward") == 1


def test_autocast_multiplies_in_bfloat16() -> None:
    """Under autocast every matrix product has bfloat16 operands."""
    _, log = train_step(torch.float32, True, fused=True)
    products = [r.signature for r in log if r.signature.name in ("aten::mm", "aten::addmm")]

    assert products
    assert {t.dtype for s in products for t in s.inputs} == {"BFloat16"}


def test_optimizers_are_the_kernels_of_a_gpu() -> None:
    """Fused AdamW is one op over all parameters of a dtype."""
    _, log = train_step(torch.bfloat16, False, fused=True)
    adam = [r.signature for r in log if r.signature.name.startswith("aten::_fused_adamw_")]

    assert len(adam) == 1


@pytest.mark.parametrize(
    ("kind", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.AdamW, torch.tensor(0.1))]
)
def test_fused_updates_without_a_meta_kernel_run(
    kind: type[torch.optim.Optimizer], lr: float | torch.Tensor
) -> None:
    """torch has none for fused SGD, nor for a learning rate in a tensor; they return nothing."""
    weight = torch.nn.Parameter(torch.empty(64, device="cuda"))
    weight.grad = torch.empty_like(weight)
    kind([weight], lr=lr, fused=True).step()
    assert weight.shape == (64,)


def test_a_fork_does_not_poison_a_device_that_has_no_driver() -> None:
    """torch.cuda binds the question at its import, before the null device is there."""
    assert torch.cuda._is_in_bad_fork.__module__ == "prismscale.devices.null.cuda_api"
    assert not torch.cuda._is_in_bad_fork()


def test_metadata_is_cached_after_the_first_step() -> None:
    """A second step with the same shapes meets no new signature."""
    _, first = train_step(torch.bfloat16, False, fused=True)
    _, second = train_step(torch.bfloat16, False, fused=True)

    assert set(second.signatures) <= set(first.signatures)


def test_activation_checkpointing_recomputes() -> None:
    """torch.utils.checkpoint runs the forward twice and gives the same gradients' shapes."""
    block = Block().cuda()
    x = torch.randn(2, 64, 256, device="cuda", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    y.sum().backward()

    assert x.grad.shape == x.shape


def test_flex_attention_is_one_kernel_each_way() -> None:
    """flex_attention allocates its outputs, never the scores."""
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.empty(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    op_log.drain_ops()
    op_log.record_ops()
    with pytest.warns(UserWarning, match="without torch.compile"):
        flex_attention(query, query, query).sum().backward()
    op_log.record_ops(False)
    signatures = [record.signature for record in op_log.drain_ops()]

    assert query.grad.shape == query.shape
    assert not any(t.shape[-2:] == (256, 256) for s in signatures for t in s.outputs)
