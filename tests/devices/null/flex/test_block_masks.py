"""How many blocks of scores a mask leaves: as torch says of real tensors, where that is known."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null.value_policy import known
from support import op_log

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: eager FlexAttention, inductor
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="inductor needs Triton"
)
LENGTH = 1024
STARTS = torch.tensor([0, 300, 640])
Mask = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keys up to the query's own."""
    return q >= k


def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The last 200 of them."""
    return (q >= k) & (q - k < 200)


def of_documents(device: str) -> Mask:
    """Causal within documents that begin at STARTS; the numbers are a tensor that came from the
    host."""
    places = torch.arange(LENGTH, device=device)
    number = torch.searchsorted(STARTS.to(device), places, right=True)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return number[q] == number[k]

    return flex.and_masks(causal, same)


def counts(mask: Any) -> list[torch.Tensor | None]:
    """Blocks of keys that each block of queries meets: partly, and whole."""
    return [known(t) for t in (mask.kv_num_blocks, mask.full_kv_num_blocks)]


def density(mask: Any) -> int:
    """Of the kernel that attention with ``mask`` launches."""
    heads = torch.empty(2, 4, LENGTH, 64, device="cuda", dtype=torch.bfloat16)
    op_log.drain_ops()
    op_log.record_ops()
    flex.flex_attention(heads, heads, heads, block_mask=mask)
    op_log.record_ops(False)
    found = [op.signature for op in op_log.drain_ops()]
    (kernel,) = (op for op in found if op.name == "prismscale_null::flex_attention")
    return kernel.arguments["density"][0]


@pytest.mark.parametrize("make", [lambda _: causal, lambda _: windowed, of_documents])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_triton)])
def test_known_masks_leave_the_blocks_that_torch_finds(
    make: Callable[[str], Mask], compiled: bool
) -> None:
    """Of a mask over real tensors; with what a program compiles, too."""
    create = torch.compile(flex.create_block_mask) if compiled else flex.create_block_mask
    real = flex.create_block_mask(make("cpu"), 2, None, LENGTH, LENGTH, device="cpu")
    partly, whole = counts(create(make("cuda"), 2, None, LENGTH, LENGTH, device="cuda"))

    assert torch.equal(partly, real.kv_num_blocks)
    assert torch.equal(whole, real.full_kv_num_blocks)


def test_masks_over_unknown_values_are_unknown() -> None:
    """Their attention is taken for causal."""
    number = torch.randint(3, (LENGTH,), device="cuda")
    mask = flex.create_block_mask(
        lambda b, h, q, k: number[q] == number[k], 2, None, LENGTH, LENGTH, device="cuda"
    )
    assert counts(mask) == [None, None]
    assert density(mask) == -1


def test_a_mask_costs_what_it_leaves() -> None:
    """In thousandths of all blocks, two digits of them."""
    whole = flex.create_block_mask(
        lambda b, h, q, k: q >= 0, None, None, LENGTH, LENGTH, device="cuda"
    )
    masks = [
        flex.create_block_mask(m, None, None, LENGTH, LENGTH, device="cuda")
        for m in (causal, windowed)
    ]
    # 36 and 21 of 64 blocks: a window of 200 keys reaches into three blocks, after the first two.
    assert [density(mask) for mask in (whole, *masks)] == [1000, 560, 330]


def test_time_follows_the_blocks_that_are_left() -> None:
    """A tenth of the blocks takes more than a tenth of the time: rows of keys are short."""
    model = load_kernel_model("h100-sxm")
    shape = "BFloat16[1,32,32768,128]"

    def time_ns(density: int) -> int:
        fields = ("prismscale_null::flex_attention", ";".join([shape] * 3), shape)
        return model.cost("\x1f".join((*fields, f"density={density}"))).device_ns

    assert time_ns(500) == pytest.approx(time_ns(-1), rel=0.01)
    assert 0.1 < time_ns(100) / time_ns(1000) < 0.15


def test_a_mask_of_long_sequences_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many blocks of queries stand for those after them."""
    from prismscale.devices.null.flex import block_masks

    monkeypatch.setattr(block_masks, "_MOST_SCORES", 2**12)
    mask = flex.create_block_mask(causal, 1, None, LENGTH, LENGTH, device="cuda")
    _, whole = counts(mask)
    assert whole is not None
    assert whole.shape == mask.kv_num_blocks.shape
    assert 0 < int(whole.sum()) < 28
