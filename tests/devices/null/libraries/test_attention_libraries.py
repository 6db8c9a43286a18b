"""FlashAttention's extensions: what they allocate, keep, and are costed as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null.libraries.flash_attention import flash_attention_2 as fa2
from prismscale.devices.null.libraries.flash_attention import flash_attention_3 as fa3
from prismscale.devices.null.libraries.flash_attention.attention_sequences import lengths_alike
from prismscale.devices.null.runtime import active
from support import op_log

BF16 = torch.bfloat16
PACKED = [0, 512, 2048]


def _empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def _ends(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.fixture(scope="session")
def flash_attn_3() -> Any:
    """Its operators; they are registered once."""
    (make,) = fa3.stand_in().modules.values()
    make()
    return torch.ops.flash_attn_3


def test_version_2_keeps_one_number_a_row_and_the_random_state() -> None:
    """Beside the output; probabilities only if asked for."""
    q, k = _empty(2, 1000, 16, 128), _empty(2, 1000, 4, 128)
    before = torch.cuda.memory_allocated()
    kept = fa2.fwd(q, k, k, None, None, 0.0, 0.1, True, -1, 0, 0.0, False, None)
    shapes = [tuple(tensor.shape) for tensor in kept]
    assert shapes == [(2, 1000, 16, 128), (2, 16, 1000), (0,), (2,)]
    rows = -(-kept[1].nbytes // 512) * 512
    assert torch.cuda.memory_allocated() - before == kept[0].nbytes + rows + 512
    *_, probabilities, _ = fa2.fwd(q, k, k, None, None, 0.1, 0.1, True, -1, 0, 0.0, True, None)
    assert probabilities.shape == (2, 16, 1024, 1024)


def test_version_2_accumulates_the_gradient_of_queries_in_float32() -> None:
    """Keys of grouped queries are expanded to all heads; neither is kept."""
    q, k = _empty(2, 1024, 16, 128), _empty(2, 1024, 4, 128)
    out, rows, *_ = fa2.fwd(q, k, k, None, None, 0.0, 0.1, True, -1, 0, 0.0, False, None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dq, dk, dv, sums = fa2.bwd(
        *(out, q, k, k, out, rows, None, None, None, None, 0.0, 0.1, True, -1, 0, 0.0, False),
        *(None, None),
    )
    assert (dk.shape, sums.shape) == (k.shape, (2, 16, 1024))
    kept = sum(t.nbytes for t in (dq, dk, dv, sums))
    accumulator, expanded = 2 * 16 * 1024 * 128 * 4, 2 * q.nbytes
    peak = torch.cuda.max_memory_allocated() - before
    assert abs(peak - kept - accumulator - expanded) < 4096
    assert abs(torch.cuda.memory_allocated() - before - kept) < 4096


def test_a_deterministic_version_2_has_an_accumulator_for_each_multiprocessor() -> None:
    """Those of an H100, 132, share 32 heads: five accumulators of dQ in place of one."""
    q = _empty(2, 1024, 16, 128)
    out, rows, *_ = fa2.fwd(q, q, q, None, None, 0.0, 0.1, True, -1, 0, 0.0, False, None)
    peaks = []

    def run() -> None:
        for deterministic in (False, True):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            fa2.bwd(
                *(out, q, q, q, out, rows, None, None, None, None, 0.0, 0.1, True, -1, 0, 0.0),
                *(deterministic, None, None),
            )
            peaks.append(torch.cuda.max_memory_allocated() - before)

    calls = [op.signature for op in op_log.ops_of(run) if "::bwd" in op.signature.name]
    assert peaks[1] - peaks[0] == 4 * (2 * 16 * 1024 * 128 * 4)
    assert [dict(call.arguments)["extents"][-1] for call in calls] == [0, 1]


def test_version_2_takes_packed_sequences() -> None:
    """Statistics by heads and tokens; the kernel is costed by the longest sequence."""
    q, k, ends = _empty(2048, 16, 128), _empty(2048, 4, 128), _ends(PACKED)
    tail = (1536, 1536, 0.0, 0.1, False, True, -1, 0, 0.0, False, None)
    out, rows, *_ = fa2.varlen_fwd(q, k, k, None, ends, ends, None, None, None, None, *tail)
    assert (out.shape, rows.shape) == (q.shape, (16, 2048))
    *grads, sums = fa2.varlen_bwd(
        *(out, q, k, k, out, rows, None, None, None, ends, ends, None),
        *(1536, 1536, 0.0, 0.1, False, True, -1, 0, 0.0, False, None, None),
    )
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
    assert sums.shape == (16, 2048 + 2 * 128)


def test_version_3_registers_its_operators(flash_attn_3: Any) -> None:
    """With defaults for what is left out, as the extension has them."""
    q, k = _empty(2, 1024, 16, 128), _empty(2, 1024, 4, 128)
    out, rows, *_ = flash_attn_3.fwd(q, k, k, is_causal=True)
    assert (out.shape, rows.shape) == (q.shape, (2, 16, 1024))
    sums, *_, key_sums, value_sums = flash_attn_3.bwd(out, q, k, k, out, rows, is_causal=True)
    assert sums.shape == (2, 16, 1024)
    assert key_sums.numel() == value_sums.numel() == k.numel(), "of grouped queries alone"
    with pytest.raises(NotImplementedError, match="caches"):
        flash_attn_3.fwd(q, k, k, page_table=_ends([0]))


def test_a_window_halves_what_a_sequence_costs(flash_attn_3: Any) -> None:
    """A quarter of the keys in place of the causal half."""
    q = _empty(1, 8192, 16, 128)
    library, model = active().library, load_kernel_model("h100-sxm")

    def cost(window: int, right: int = -1, *, causal: bool = True) -> int:
        known = library.ps_signature_count()
        sides = {"window_size_left": window, "window_size_right": right}
        flash_attn_3.fwd(q, q, q, is_causal=causal, **sides)
        texts = [
            library.ps_signature(i).decode() for i in range(known, library.ps_signature_count())
        ]
        (text,) = [text for text in texts if text.startswith("flash_attn_3::forward")]
        return model.cost(text).device_ns

    assert 0.3 < cost(2047) / cost(-1) < 0.7
    # 129 keys, which a query sees on both sides.
    assert cost(64, 64, causal=False) < 0.1 * cost(-1, causal=False)


def test_packed_documents_of_known_lengths_are_as_long_as_they_are() -> None:
    """Of two documents, the longer one decides; of many short ones beside it, less does."""
    pair, many = _ends([0, 5000, 8192]), _ends([0, 4096, *range(4224, 8193, 128)])
    assert lengths_alike(pair, 5000, 5000) == (4352, 4352)
    assert lengths_alike(many, 4096, 4096) == (2176, 2176)
    assert lengths_alike(many, 4096, 8192) == (4096, 8192)
