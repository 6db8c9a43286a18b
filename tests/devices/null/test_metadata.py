"""Output metadata equals what torch's meta device says, op by op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st


def f32(*shape: int, device: str) -> torch.Tensor:
    return torch.empty(*shape, device=device)


def bf16(*shape: int, device: str) -> torch.Tensor:
    return torch.empty(*shape, device=device, dtype=torch.bfloat16)


def i64(*shape: int, device: str) -> torch.Tensor:
    return torch.empty(*shape, device=device, dtype=torch.int64)


SWEEP = {
    "add broadcast": lambda d: f32(4, 1, 3, device=d) + f32(5, 1, device=d),
    "mixed dtypes": lambda d: f32(4, device=d) * bf16(4, device=d),
    "int and float": lambda d: i64(4, device=d) / 2,
    "compare": lambda d: f32(4, 4, device=d) > 0.5,
    "where": lambda d: torch.where(f32(3, device=d) > 0, f32(3, device=d), 0.0),
    "matmul 3d": lambda d: bf16(2, 3, 4, device=d) @ bf16(2, 4, 5, device=d),
    "linear": lambda d: F.linear(bf16(2, 7, 8, device=d), bf16(16, 8, device=d)),
    "sum dims": lambda d: f32(2, 3, 4, device=d).sum((0, 2), keepdim=True),
    "mean": lambda d: bf16(2, 3, device=d).mean(-1),
    "var_mean": lambda d: torch.var_mean(f32(2, 3, device=d), dim=1),
    "argmax": lambda d: f32(2, 3, device=d).argmax(1),
    "topk": lambda d: f32(4, 10, device=d).topk(3),
    "sort": lambda d: f32(4, 10, device=d).sort(descending=True),
    "cumsum": lambda d: i64(4, 10, device=d).cumsum(0),
    "softmax": lambda d: bf16(4, 10, device=d).softmax(-1, dtype=torch.float32),
    "cross entropy": lambda d: F.cross_entropy(f32(4, 10, device=d), i64(4, device=d)),
    "layer norm": lambda d: F.layer_norm(bf16(2, 3, 8, device=d), (8,)),
    "rms norm": lambda d: F.rms_norm(bf16(2, 3, 8, device=d), (8,)),
    "gelu": lambda d: F.gelu(bf16(2, 3, device=d), approximate="tanh"),
    "silu": lambda d: F.silu(f32(2, 3, device=d)),
    "dropout": lambda d: F.dropout(f32(2, 3, device=d), 0.1),
    "embedding": lambda d: F.embedding(i64(2, 5, device=d), bf16(10, 8, device=d)),
    "one hot": lambda d: F.one_hot(i64(5, device=d), 7),
    "gather": lambda d: f32(4, 10, device=d).gather(1, i64(4, 2, device=d)),
    "scatter": lambda d: f32(4, 10, device=d).scatter(1, i64(4, 2, device=d), 1.0),
    "index add": lambda d: f32(9, 4, device=d).index_add(0, i64(5, device=d), f32(5, 4, device=d)),
    "index select": lambda d: f32(9, 4, device=d).index_select(0, i64(3, device=d)),
    "fancy index": lambda d: f32(9, 4, device=d)[i64(3, device=d), :2],
    "cat": lambda d: torch.cat([f32(2, 3, device=d), f32(4, 3, device=d)]),
    "stack": lambda d: torch.stack([f32(2, 3, device=d)] * 4, 1),
    "split": lambda d: f32(10, 4, device=d).split([3, 7]),
    "chunk": lambda d: bf16(10, 4, device=d).chunk(3, 1),
    "transpose contiguous": lambda d: f32(2, 3, 4, device=d).transpose(0, 2).contiguous(),
    "channels last": lambda d: f32(2, 3, 4, 4, device=d).to(memory_format=torch.channels_last),
    "conv2d": lambda d: F.conv2d(f32(2, 3, 8, 8, device=d), f32(5, 3, 3, 3, device=d), padding=1),
    "conv1d": lambda d: F.conv1d(bf16(2, 3, 8, device=d), bf16(5, 3, 3, device=d)),
    "batch norm": lambda d: F.batch_norm(f32(2, 3, 4, device=d), None, None, training=True),
    "max pool": lambda d: F.max_pool2d(f32(2, 3, 8, 8, device=d), 2),
    "interpolate": lambda d: F.interpolate(f32(1, 3, 8, 8, device=d), scale_factor=2),
    "pad": lambda d: F.pad(f32(2, 3, device=d), (1, 2)),
    "tril": lambda d: f32(4, 4, device=d).tril(),
    "outer": lambda d: torch.outer(f32(4, device=d), f32(5, device=d)),
    "einsum": lambda d: torch.einsum("bij,jk->bik", f32(2, 3, 4, device=d), f32(4, 5, device=d)),
    "norm": lambda d: torch.linalg.vector_norm(f32(4, 5, device=d), dim=1),
    "foreach norm": lambda d: torch._foreach_norm([f32(4, device=d), f32(5, 6, device=d)]),
    "foreach mul": lambda d: torch._foreach_mul([f32(4, device=d), f32(5, 6, device=d)], 2.0),
    "complex": lambda d: torch.view_as_real(torch.view_as_complex(f32(4, 2, device=d)).conj() * 2),
    "polar": lambda d: torch.polar(f32(4, device=d), f32(4, device=d)),
    "clamp": lambda d: f32(4, device=d).clamp(min=0),
    "pow": lambda d: i64(4, device=d) ** 2,
    "logsumexp": lambda d: f32(4, 3, device=d).logsumexp(1),
    "repeat": lambda d: f32(2, 3, device=d).repeat(2, 2),
    "repeat interleave": lambda d: f32(2, 3, device=d).repeat_interleave(3, dim=1),
    "roll": lambda d: f32(4, 3, device=d).roll(1, 0),
    "unfold": lambda d: f32(10, device=d).unfold(0, 4, 2),
    "out": lambda d: torch.add(f32(3, device=d), 1, out=f32(0, device=d)),
    "float8": lambda d: f32(4, 4, device=d).to(torch.float8_e4m3fn),
    "bmm": lambda d: torch.bmm(bf16(2, 3, 4, device=d), bf16(2, 4, 5, device=d)),
    "addmm": lambda d: torch.addmm(f32(5, device=d), f32(3, 4, device=d), f32(4, 5, device=d)),
    "bucketize": lambda d: torch.bucketize(f32(7, device=d), f32(3, device=d)),
    "nll": lambda d: F.nll_loss(f32(4, 10, device=d), i64(4, device=d)),
    "full like": lambda d: torch.full_like(bf16(2, 3, device=d), 2.0),
    "linspace": lambda d: torch.linspace(0, 1, 5000, device=d),
    "arange": lambda d: torch.arange(2000, device=d),
    "randn": lambda d: torch.randn(3, 4, device=d),
    "randperm": lambda d: torch.randperm(9, device=d),
    "multinomial": lambda d: torch.multinomial(f32(3, 10, device=d), 2),
}


def metadata(result):
    """Shape, dtype, offset and strides, through tuples and lists.

    The stride of a dimension of size 1 means nothing, and Meta kernels differ from CPU ones there.
    """
    if isinstance(result, torch.Tensor):
        strides = [s for s, n in zip(result.stride(), result.shape, strict=True) if n != 1]
        return tuple(result.shape), result.dtype, strides, result.storage_offset()
    return [metadata(item) for item in result]


@pytest.mark.parametrize("name", SWEEP)
def test_common_ops_have_the_metadata_of_the_meta_device(name: str) -> None:
    """Shape, dtype and strides of every result, twice: computed and from the cache."""
    expected = metadata(SWEEP[name]("meta"))

    assert metadata(SWEEP[name]("cuda")) == expected
    assert metadata(SWEEP[name]("cuda")) == expected


DIMS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(DIMS, st.data())
def test_permuted_binary_ops_match_meta(shape, data) -> None:
    """Strides of element-wise results follow permuted and broadcast operands."""
    order = data.draw(st.permutations(range(len(shape))))
    squeezed = [1 if data.draw(st.booleans()) else size for size in shape]

    def compute(device: str) -> torch.Tensor:
        left = torch.empty(shape, device=device).permute(order)
        right = torch.empty(squeezed, device=device, dtype=torch.float16).permute(order)
        return left * right + 1

    assert metadata(compute("cuda")) == metadata(compute("meta"))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_gradients_of_a_product_match_meta(batch: int, rows: int, inner: int, columns: int) -> None:
    """Autograd through a batched product gives gradients with the metadata of meta's."""

    def gradients(device: str) -> list[torch.Tensor]:
        left = torch.empty(batch, rows, inner, device=device, requires_grad=True)
        right = torch.empty(inner, columns, device=device, requires_grad=True)
        (left @ right).relu().mean().backward()
        return [left.grad, right.grad]

    assert metadata(gradients("cuda")) == metadata(gradients("meta"))


def test_an_op_without_a_shape_rule_is_named() -> None:
    """A custom op that has no Meta kernel says how to give it one."""
    library = torch.library.Library("nulltest", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=r"nulltest::opaque.*register_fake"):
        torch.ops.nulltest.opaque(torch.ones(2, device="cuda"))
