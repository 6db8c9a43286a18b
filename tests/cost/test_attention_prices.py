"""What fused attention costs: by mask, direction, implementation and how long it lasts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile, ScaledGpu
from prismscale.cost.kernel_signature import FIELD
from prismscale.errors import UsageError
from support.kernel_prices import H100, cost, text


def attention(length: int, causal: int = 1, name: str = "_scaled_dot_product_flash_attention"):
    """Self-attention with 32 heads of 128."""
    shape = f"BFloat16[1,32,{length},128]"
    inputs = ";".join([shape] * (6 if "backward" in name else 3))
    return cost(name, inputs, shape, f"is_causal={causal}")


def test_a_causal_mask_halves_the_work() -> None:
    """On long sequences; the half that is left runs at a lower share of the peak."""
    ratio = attention(16384).device_ns / attention(16384, causal=0).device_ns

    assert ratio == pytest.approx(0.5 / H100.profile.attention["flash"].causal_factor, rel=0.05)


def test_attention_backward_costs_more_than_twice_the_forward() -> None:
    """Five products instead of two."""
    back = attention(8192, name="_scaled_dot_product_flash_attention_backward")

    assert 2.5 < back.device_ns / attention(8192).device_ns < 4


@pytest.mark.parametrize(
    ("length", "causal", "tflops"), [(512, 0, 309), (4096, 0, 368), (1024, 1, 260), (16384, 1, 335)]
)
def test_flash_attention_is_what_its_authors_measured(
    length: int, causal: int, tflops: float
) -> None:
    """FlashAttention-3, figure 5: 16,384 tokens, 16 heads of 128; torch's build reaches 0.895."""
    shape = f"BFloat16[{16384 // length},16,{length},128]"
    inputs, name = ";".join([shape] * 3), "_scaled_dot_product_flash_attention"
    burst = ModelledKernels(profile=H100.profile.burst())
    found = burst.cost(text(name, inputs, shape, f"is_causal={causal}"))
    flops = 4 * 16384 * length * 2048 / (1 + causal)

    assert flops / found.device_ns / 1e3 == pytest.approx(0.895 * tflops, rel=0.1)


def test_a_deterministic_backward_pass_costs_its_overhead_for_each_score() -> None:
    """More for heads of 64 than of 128; those of 192 are summed in a fixed order anyway."""
    free = replace(H100.profile.attention["cudnn_backward"], fixed_order_overhead=0.0)
    ordered = replace(free, fixed_order_overhead=50.0)

    def longer(size: int) -> float:
        """Time with the overhead, over time without."""
        times = []
        for roofline in (ordered, free):
            table = {**H100.profile.attention, "cudnn_backward": roofline}
            model = ModelledKernels(profile=replace(H100.profile, attention=table))
            shape = f"BFloat16[2,64,8192,{size}]"
            name = "_scaled_dot_product_cudnn_attention_backward"
            stated = "is_causal=1;deterministic=1"
            times.append(model.cost(text(name, ";".join([shape] * 6), shape, stated)).device_ns)
        return times[0] / times[1]

    assert longer(64) > longer(128) > 1.1
    assert longer(192) == 1


def test_transformer_engines_attention_is_cudnns() -> None:
    """What its stand-in launches costs what torch's operator of cuDNN costs."""
    shape = "BFloat16[1,32,4096,128]"
    inputs = ";".join([shape] * 3)
    stated = "extents=32,4096,4096,128,128,1"
    engine = H100.cost(
        FIELD.join(("transformer_engine::fused_attn_fwd.attention", inputs, shape, stated))
    )
    torch = cost("_scaled_dot_product_cudnn_attention", inputs, shape, "is_causal=1")

    assert engine == torch


def test_attention_that_lasts_is_slower_than_a_burst() -> None:
    """By less than products are: POWER_RESERVE."""
    shape = "BFloat16[1,32,16384,128]"
    signature = text("_scaled_dot_product_cudnn_attention", ";".join([shape] * 3), shape, "")
    b200 = KernelProfile.load("b200")
    lasting = ModelledKernels(profile=b200).cost(signature).device_ns
    burst = ModelledKernels(profile=b200.burst()).cost(signature).device_ns

    assert 0.7 < burst / lasting < 0.9


def test_attention_without_keys_costs_no_more_than_a_kernel() -> None:
    """An empty batch has no scores."""
    empty = "BFloat16[0,32,4096,128]"

    assert cost("_scaled_dot_product_cudnn_attention", ";".join([empty] * 3), empty).device_ns < 6e3


def test_packed_attention_is_attention_of_its_documents() -> None:
    """Four packed documents cost what a batch of four costs."""
    packed = cost(
        "_flash_attention_forward",
        ";".join(["BFloat16[8192,32,128]"] * 3),
        "BFloat16[8192,32,128]",
        "max_q=2048;max_k=2048;is_causal=1",
    )
    shape = "BFloat16[4,2048,32,128]"
    batch = cost("_flash_attention_forward", ";".join([shape] * 3), shape, "is_causal=1")

    assert packed.device_ns == pytest.approx(batch.device_ns, rel=0.01)


def test_faster_exponentials_speed_up_attention_and_products_not() -> None:
    """A GPU by data sheet, as the B300 is by the B200's."""
    sheet = """
        name = "mine"
        device = "mine"
        scaled_from = "b200"
        multiprocessors = 148
        memory_bandwidth_bytes_per_s = 8.0e12
        power_watts = 1000
        clock_headroom = 1.06
        exponentials = {}
        [peak_flops]
        BFloat16 = 2250e12
    """
    usual, fast = (KernelProfile.from_toml(sheet.format(rate)) for rate in (1.0, 2.0))
    ours, theirs = usual.attention["cudnn"], fast.attention["cudnn"]

    assert theirs.head_overhead == ours.head_overhead / 2
    assert theirs.efficiency == ours.efficiency
    assert fast.gemm == usual.gemm


def test_exponentials_are_a_positive_rate() -> None:
    """A data sheet that says 0 is refused by name."""
    with pytest.raises(UsageError, match="exponentials is 0"):
        ScaledGpu(
            name="mine",
            device="mine",
            scaled_from="b200",
            multiprocessors=148,
            memory_bandwidth_bytes_per_s=8e12,
            peak_flops={},
            exponentials=0,
        )


def test_cudnns_8_bit_backward_pass_gains_little_by_a_causal_mask() -> None:
    """On Hopper it computes nearly all that the mask leaves out; in 16 bits it does not."""
    narrow, wide = (H100.profile.attention[f"cudnn{kind}_backward"] for kind in ("_fp8", ""))

    assert narrow.causal_factor < 0.6
    assert wide.causal_factor == 1


def test_a_window_leaves_out_what_lies_outside() -> None:
    """``varlen_attn`` states a causal mask as a window without keys to the right."""
    packed = ";".join(["BFloat16[32768,32,128]"] * 3)

    def lasts(left: int, right: int, causal: int = 0) -> float:
        arguments = f"max_q=32768;max_k=32768;is_causal={causal}"
        arguments += f";window_size_left={left};window_size_right={right}"
        return cost("_flash_attention_forward", packed, packed, arguments).device_ns

    assert lasts(-1, 0) == lasts(-1, -1, causal=1) == lasts(32767, 0)
    assert lasts(1023, 0) == lasts(1023, 0, causal=1) < lasts(-1, 0) / 8
    assert lasts(512, 511) == lasts(1023, 0)


def test_memory_efficient_attention_has_causal_masks_of_two_kinds() -> None:
    """From the upper left and from the lower right corner."""
    packed = ";".join(["BFloat16[1,8192,32,128]"] * 3)
    none, upper, lower = (
        cost("_efficient_attention_forward", packed, packed, f"custom_mask_type={kind}").device_ns
        for kind in range(3)
    )
    assert upper == lower < 0.7 * none
