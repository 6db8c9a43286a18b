"""Distributions of kernel times, and the profiles that hold their constants."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.cost.kernel import ConstantKernels, ModelledKernels, load_kernel_model
from prismscale.cost.kernel_kinds import KINDS, kind_of
from prismscale.cost.kernel_memory import bytes_moved
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import FIELD, parse_signature
from prismscale.errors import FormatError, UsageError
from support.kernel_prices import H100, cost, text


def product(m: int, n: int, k: int, dtype: str = "BFloat16") -> str:
    """A matrix product."""
    return text("mm", f"{dtype}[{m},{k}];{dtype}[{k},{n}]", f"{dtype}[{m},{n}]")


@pytest.mark.parametrize("gpu", KernelProfile.names())
def test_every_profile_prices_a_product(gpu: str) -> None:
    """A large product lasts at 45 to 85 % of the peak; its error and source are given."""
    model = load_kernel_model(gpu)
    found = model.cost(product(8192, 8192, 8192))
    peak = model.profile.gemm["BFloat16"].peak_flops

    assert 0.45 < 2 * 8192**3 / (found.device_ns * 1e-9) / peak < 0.85
    assert found.error is not None
    measured = not model.profile.scaled_from or "BFloat16" in model.profile.own_products
    assert found.source == ("modelled" if measured else "scaled")


@pytest.mark.parametrize("gpu", KernelProfile.names())
def test_every_profile_names_its_sources(gpu: str) -> None:
    """No constants without provenance."""
    assert KernelProfile.load(gpu).sources


def test_an_unknown_gpu_is_refused() -> None:
    """The list of known ones is in the message."""
    with pytest.raises(UsageError, match=r"h100-sxn.*h100-sxm.*did you mean h100-sxm"):
        load_kernel_model("h100-sxn")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name =", "nam =", "unknown key 'nam'"),
        ("multiprocessors = 132", "multiprocessors = 0", "positive"),
        ("[memory.unknown]", "[memory.other]", "memory.unknown"),
        ("[host]", "[host", "not valid TOML"),
    ],
)
def test_damaged_profiles_are_refused(old: str, new: str, message: str) -> None:
    """A bad file names what is wrong with it."""
    file = resources.files("prismscale.cost").joinpath("kernels", "h100-sxm.toml")
    with pytest.raises(FormatError, match=message):
        KernelProfile.from_toml(file.read_text(encoding="utf-8").replace(old, new, 1))


def test_scaled_errors_are_wider() -> None:
    """A GPU by data sheet is less certain, but for what was measured on it."""
    table = tomllib.loads(
        resources.files("prismscale.cost").joinpath("kernels", "b200.toml").read_text()
    )
    b200 = KernelProfile.load("b200")

    assert b200.errors["copy"] == table["error_factor"] * H100.profile.errors["copy"]
    assert b200.errors["gemm"] == table["errors"]["gemm"]


def test_a_gpu_by_data_sheet_may_have_another_host() -> None:
    """A Grace CPU takes longer for an operator than the host of the GPU that was measured."""
    b200, gb200, gb300 = (KernelProfile.load(name).host for name in ("b200", "gb200", "gb300"))

    assert gb200.op_ns > b200.op_ns
    assert gb300 == gb200


def test_one_tile_too_many_costs_a_share_of_a_wave() -> None:
    """132 multiprocessors do 132 tiles at once; how much of a wave one more costs is a constant."""
    full, spilt = product(11 * 256, 12 * 128, 8192), product(11 * 256 + 1, 12 * 128, 8192)

    def grown(rounding: float) -> float:
        roofline = replace(H100.profile.gemm["BFloat16"], wave_rounding=rounding)
        profile = replace(H100.profile, gemm={**H100.profile.gemm, "BFloat16": roofline})
        model = ModelledKernels(profile=profile)
        return model.cost(spilt).device_ns / model.cost(full).device_ns

    assert grown(1.0) > 1.1
    assert grown(0.0) < grown(1.0) - 0.03


def test_what_lasts_is_slower_than_a_burst() -> None:
    """Large products feel the power limit, those that wait for memory do not."""
    burst = ModelledKernels(profile=H100.profile.burst())
    large, thin = product(8192, 8192, 8192), product(8192, 16, 8192)

    assert H100.cost(large).device_ns > 1.1 * burst.cost(large).device_ns
    assert H100.cost(thin).device_ns == pytest.approx(burst.cost(thin).device_ns, rel=0.01)


def test_twice_the_power_lets_more_of_the_peak_last() -> None:
    """A GPU by data sheet: its share of the peak goes with watts for each FLOP/s."""
    sheet = """
        name = "mine"
        device = "mine"
        scaled_from = "b200"
        multiprocessors = 148
        memory_bandwidth_bytes_per_s = 4.0e12
        power_watts = {}
        clock_headroom = 1.06
        [peak_flops]
        BFloat16 = 2250e12
    """
    usual, hungry = (KernelProfile.from_toml(sheet.format(watts)) for watts in (1000, 2000))
    known, ours, theirs = (p.gemm["BFloat16"] for p in (KernelProfile.load("b200"), usual, hungry))

    assert ours.efficiency == known.efficiency
    assert theirs.efficiency == pytest.approx(2**0.25 * ours.efficiency)
    assert theirs.sustained_cap == pytest.approx(2**1.27 * known.sustained_cap)
    assert ours.cache_factor == pytest.approx(2 * known.cache_factor)


@given(st.integers(64, 4096), st.integers(64, 4096), st.integers(64, 8192))
def test_products_never_beat_the_peak(m: int, n: int, k: int) -> None:
    """Whatever the shape, throughput stays below the data sheet's."""
    seconds = H100.cost(product(m, n, k)).device_ns * 1e-9

    assert 2 * m * n * k / seconds < H100.profile.gemm["BFloat16"].peak_flops


def test_short_inner_loops_are_less_efficient() -> None:
    """The same work with a smaller K takes longer."""
    assert H100.cost(product(4096, 8192, 256)).device_ns > (
        H100.cost(product(4096, 4096, 512)).device_ns
    )


def test_narrow_types_are_faster() -> None:
    """float8 beats bfloat16 beats float32."""
    times = [
        H100.cost(product(4096, 4096, 4096, dtype)).device_ns
        for dtype in ("Float8_e4m3fn", "BFloat16", "Float")
    ]

    assert times == sorted(times)


def test_tf32_is_half_as_fast_as_16_bits() -> None:
    """Where the program asks for it; floats of 32 bits have no tensor cores otherwise."""
    sizes = "Float[8192,8192];Float[8192,8192]", "Float[8192,8192]"
    plain, fast = (cost("mm", *sizes, arguments).device_ns for arguments in ("", "tf32=1"))
    halves = H100.cost(product(8192, 8192, 8192)).device_ns
    assert fast == pytest.approx(2 * halves, rel=0.02)
    assert plain > 3 * fast
    assert cost("mm", *sizes, "tf32=1").source == "modelled"


def test_a_library_of_its_own_has_its_own_products() -> None:
    """Triton's reach less of the peak, split no K, and are one kernel whatever they multiply."""
    assert H100.profile.errors["triton"] > H100.profile.errors["gemm"]
    large = "extents=1,8192,8192,8192;launches=1;bits=16"
    factors = "BFloat16[8192,8192];BFloat16[8192,8192]", "BFloat16[8192,8192]"
    triton = H100.cost(FIELD.join(("triton::mine.gemm", *factors, large))).device_ns
    assert triton > 1.1 * H100.cost(product(8192, 8192, 8192)).device_ns

    few = "BFloat16[64,65536];BFloat16[65536,64]", "BFloat16[64,64]"
    narrow = "extents=1,64,64,65536;launches=1;bits=16"
    assert H100.cost(FIELD.join(("triton::mine.gemm", *few, narrow))).device_ns > 5 * (
        H100.cost(product(64, 64, 65536)).device_ns
    )
    halves = "extents=1,64,64,32768,1,64,64,32768;launches=1;bits=16"
    assert H100.cost(FIELD.join(("triton::mine.gemm", *few, halves))).device_ns == pytest.approx(
        H100.cost(FIELD.join(("triton::mine.gemm", *few, narrow))).device_ns, rel=0.05
    )


def test_linear_is_its_product() -> None:
    """linear over (batch, length, features) is one product over all rows."""
    fused = cost("linear", "BFloat16[2,64,512];BFloat16[1024,512]", "BFloat16[2,64,1024]")

    assert fused.device_ns == H100.cost(product(128, 1024, 512)).device_ns


def test_grouped_products_cost_their_rows() -> None:
    """Eight experts over 8,192 rows do the work of one product of as many rows."""
    grouped = cost(
        "_grouped_mm", "BFloat16[8192,4096];BFloat16[8,4096,4096];Int[8]", "BFloat16[8192,4096]"
    )
    whole = H100.cost(product(8192, 4096, 4096))

    assert grouped.device_ns == pytest.approx(whole.device_ns, rel=0.15)


def test_convolution_backward_is_twice_the_forward() -> None:
    """Gradients of image and weight are one product each."""
    image, weight, out = "Half[32,256,56,56]", "Half[256,256,3,3]", "Half[32,256,56,56]"
    forward = cost("convolution", f"{image};{weight}", out)
    back = cost("convolution_backward", f"{out};{image};{weight}", f"{image};{weight}")

    assert back.device_ns == pytest.approx(2 * forward.device_ns, rel=0.01)


def test_torchs_norms_read_wide_rows_again() -> None:
    """As many elements in rows of 16,384 take longer than in rows of 4,096; cuDNN's do not."""

    def norm(name: str, rows: int, width: int) -> int:
        x, w, s = f"BFloat16[{rows},{width}]", f"BFloat16[{width}]", f"Float[{rows},1]"
        return H100.cost(FIELD.join((name, f"{x};{w}", f"{x};{s}", ""))).device_ns

    torch, cudnn = "aten::_fused_rms_norm", "transformer_engine::rmsnorm_fwd.fused_norm"

    assert norm(torch, 4096, 16384) > 1.2 * norm(torch, 16384, 4096)
    assert norm(cudnn, 4096, 16384) == pytest.approx(norm(cudnn, 16384, 4096), rel=0.01)


def test_results_of_32_bits_cost_more_than_their_bytes() -> None:
    """Gradients of weights that are added up in 32 bits; float32 products stay as they are."""
    read = "BFloat16[8192,8192];BFloat16[8192,8192]"
    wide = cost("mm", read, "Float[8192,8192]").device_ns
    narrow = cost("mm", read, "BFloat16[8192,8192]").device_ns

    assert 1.04 < wide / narrow < 1.07


def test_a_library_writes_results_of_32_bits_among_its_inputs() -> None:
    """Transformer Engine's gradients of weights: read, added to, and written."""
    factors = "BFloat16[4096,8192];BFloat16[4096,14336]"
    arguments = "extents=1,14336,8192,4096;launches=1;bits=16"
    name = "transformer_engine::generic_gemm.gemm"

    def gradient(dtype: str) -> int:
        inputs = ";".join((factors, f"{dtype}[14336,8192]", f"{dtype}[14336,8192]"))
        return H100.cost(FIELD.join((name, inputs, "", arguments))).device_ns

    assert 1.04 < gradient("Float") / gradient("BFloat16") < 1.07


def test_elementwise_time_follows_bytes() -> None:
    """Twice the elements take twice the time once the tensors are large."""
    small = cost("mul.Tensor", "Float[8192,8192];Float[8192,8192]", "Float[8192,8192]")
    large = cost("mul.Tensor", "Float[16384,8192];Float[16384,8192]", "Float[16384,8192]")

    assert large.device_ns == pytest.approx(2 * small.device_ns, rel=0.02)


def test_broadcasting_costs_more_than_a_number() -> None:
    """A row that is added to a matrix comes from the caches, not for free."""
    row = cost("add.Tensor", "Float[8192,8192];Float[8192]", "Float[8192,8192]")
    number = cost("add.Tensor", "Float[8192,8192];Float[]!cpu", "Float[8192,8192]")

    assert row.kind == "broadcast"
    assert row.device_ns > 1.2 * number.device_ns


@pytest.mark.parametrize(
    ("signature", "kind"),
    [
        (text("t", "Float[2,3]", "Float[3,2]@1,3"), "view"),
        (text("copy_", "Float[8]!cpu;Float[8]", "Float[8]!cpu"), "transfer"),
        (text("copy_", "Float[8];Half[8]", "Float[8]"), "copy"),
        (text("clone", "Float[8,4]@1,8", "Float[8,4]"), "strided_copy"),
        (text("_softmax", "Float[8,512]", "Float[8,512]", "dim=-1"), "softmax"),
        (text("_softmax", "Float[8,2048]", "Float[8,2048]", "dim=1"), "long_softmax"),
        (text("_foreach_norm.Scalar", "Float[8]", "Float[]"), "foreach_reduction"),
        (text("special_erf", "Float[8]", "Float[8]"), "pointwise"),
        (text("add.Tensor", "Float[8,8];Float[8]", "Float[8,8]"), "broadcast"),
        ("cuda::graph_launch" + 3 * FIELD, "graph_launch"),
        ("c10d::call" + 3 * FIELD, "communication_call"),
        (FIELD.join(("inductor::call", "Float[8]", "", "")), "compiled_call"),
        ("fsdp::chunk_cat_mixed_dtype" + 3 * FIELD, "copy"),
        (text("upsample_nearest2d", "Float[2,3,4,4]", "Float[2,3,8,8]"), "broadcast"),
        ("mine::scale" + 3 * FIELD, "unknown"),
    ],
)
def test_kinds(signature: str, kind: str) -> None:
    """Operators are sorted by what sets their time, into kinds that a variability profile knows."""
    assert kind_of(parse_signature(signature)) == kind
    assert kind == "view" or kind in KINDS


def test_views_cost_the_device_nothing() -> None:
    """They cost the host, though."""
    found = cost("transpose.int", "Float[2,3]", "Float[3,2]@1,3")

    assert found.device_ns == 0
    assert found.host_ns > 0


def test_a_call_of_a_compiled_graph_costs_the_host_an_operator() -> None:
    """And its kernels a launch each."""
    call = H100.cost(FIELD.join(("inductor::call", "Float[8]", "", "")))
    kernel = H100.cost(FIELD.join(("inductor::triton_poi_fused_add_0", "Float[8]", "Float[8]", "")))

    assert (call.device_ns, call.host_ns) == (0, round(H100.profile.host.op_ns))
    assert kernel.host_ns == round(H100.profile.host.launch_ns)


def test_new_memory_is_filled_by_a_launch_without_an_operator() -> None:
    """The device takes as long as for a program's own fill."""
    filled = cost("empty.memory_format", "", "Float[4096,4096]")
    own = cost("fill_.Scalar", "Float[4096,4096]", "Float[4096,4096]")

    assert (filled.kind, filled.device_ns) == ("fill", own.device_ns)
    assert filled.host_ns == round(H100.profile.host.launch_ns)


def test_unknown_operators_say_so() -> None:
    """They are costed by their bytes, as a default, with no error to go by."""
    found = H100.cost(FIELD.join(("mine::scale", "Float[4096,4096]", "Float[4096,4096]", "")))

    assert (found.source, found.kind, found.error) == ("default", "unknown", None)
    assert found.device_ns > 2 * 4 * 4096**2 / 3.35e12 * 1e9


def test_fused_adamw_reads_four_lists_and_writes_three() -> None:
    """Parameters, gradients and two moments in; all but the gradients out."""
    lists = ";".join(["Float[1000000]"] * 2 * 4 + ["Float[]"] * 2)
    moved = bytes_moved(parse_signature(text("_fused_adamw_", lists)), "optimizer")

    assert moved == pytest.approx(7 * 2 * 4_000_000, rel=1e-4)


def test_foreach_over_many_tensors_takes_several_launches() -> None:
    """At most 110 tensors fit one launch: the host pays for the others."""
    few = cost("_foreach_mul_.Scalar", ";".join(["Float[8]"] * 100))
    many = cost("_foreach_mul_.Scalar", ";".join(["Float[8]"] * 300))

    assert many.host_ns - few.host_ns == 2 * H100.profile.host.launch_ns


def test_a_lookup_does_not_read_the_table() -> None:
    """An embedding costs what it returns, whatever the vocabulary."""
    found = [cost("embedding", f"Half[{v},512];Long[64]", "Half[64,512]") for v in (1000, 9**6)]

    assert found[0] == found[1]


def test_transfers_run_at_the_speed_of_the_bus() -> None:
    """A GiB takes its bytes over the link's bandwidth."""
    found = cost("copy_", "Byte[1073741824];Byte[1073741824]!cpu", "Byte[1073741824]")

    assert found.device_ns == pytest.approx(2**30 / 50e9 * 1e9, rel=0.01)


def test_fused_regions_share_a_pass() -> None:
    """Elementwise work costs 22 %; products, FSDP's copies and kernels of libraries their own
    price."""
    fused = replace(H100, fused=True)
    add = text("add.Tensor", "Float[4096,4096];Float[4096,4096]", "Float[4096,4096]")
    gathered = text("split_with_sizes_copy.out", "BFloat16[8,4096]", "", "split_sizes=4096;dim=1")

    assert fused.cost(add).device_ns == round(0.22 * H100.cost(add).device_ns)
    norm = text("apex::layer_norm.norm", "Half[4096,1024];Half[1024]", "Half[4096,1024]")
    for other in (product(512, 512, 512), gathered, norm):
        assert fused.cost(other) == H100.cost(other)


def test_the_null_model_knows_nothing() -> None:
    """It answers its constant, marked as a default."""
    found = ConstantKernels(device_ns=7, host_ns=3).cost(product(8, 8, 8))

    assert (found.device_ns, found.host_ns, found.source) == (7, 3, "default")


@given(st.lists(st.integers(0, 4096), max_size=4), st.sampled_from(sorted(H100.profile.memory)))
def test_prices_are_finite(sizes: list[int], kind: str) -> None:
    """No shape, empty or scalar, breaks a roofline."""
    shape = f"Float[{','.join(map(str, sizes))}]"
    names = {"pointwise": "add", "optimizer": "_fused_adamw_", "foreach": "_foreach_add_.List"}
    found = cost(names.get(kind, kind), f"{shape};{shape};{shape};{shape};{shape}", shape)

    assert math.isfinite(found.device_ns)
    assert found.device_ns >= 0


def test_models_are_values() -> None:
    """Two models of one GPU are equal; a fused one differs."""
    assert load_kernel_model("h100-sxm") == H100
    assert ModelledKernels(profile=H100.profile, fused=True) != H100
