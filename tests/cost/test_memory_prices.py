"""What kernels that wait for memory cost: caches, layouts, element types, scatters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_memory import CACHE_HOLDS, CACHE_LOSES, bytes_moved
from prismscale.cost.kernel_profile import Cache, KernelProfile, MemoryRoofline
from prismscale.cost.kernel_signature import FIELD, parse_signature
from prismscale.errors import UsageError
from support.kernel_prices import H100, text

COLD = ModelledKernels(profile=H100.profile.cold())


def cost(signature: str) -> int:
    """Nanoseconds on the device."""
    return H100.cost(signature).device_ns


def copy(into: str, source: str) -> str:
    """A copy between two tensors of the device."""
    return text("copy_", f"{into};{source}", into)


def added(elements: int) -> str:
    """A sum of two tensors of 32 bits: 12 bytes an element."""
    x = f"Float[{elements}]"
    return text("add.Tensor", f"{x};{x}", x)


def bytes_of(signature: str) -> int:
    """What the call moves."""
    call = parse_signature(signature)
    return bytes_moved(call, kind_of(call))


def test_what_fits_into_the_cache_comes_from_there() -> None:
    """Far below the cache's size a call is faster than with a cold one, far above it is not."""
    cache = H100.profile.cache
    assert cache is not None
    small, large = (int(share * cache.bytes / 12) for share in (CACHE_HOLDS, 1.1 * CACHE_LOSES))

    assert H100.cost(added(small)).device_ns < 0.6 * COLD.cost(added(small)).device_ns
    assert H100.cost(added(large)) == COLD.cost(added(large))


def test_more_bytes_never_cost_less() -> None:
    """Also where the cache starts to lose operands."""
    times = [H100.cost(added(n)).device_ns for n in range(500_000, 6_000_000, 50_000)]

    assert times == sorted(times)


def test_a_gpu_by_its_data_sheet_has_its_own_cache() -> None:
    """The size is stated, the speed goes with the tensor cores' peak."""
    h100, b200 = H100.profile.cache, KernelProfile.load("b200").cache
    assert h100 is not None
    assert b200 is not None

    assert b200.bytes == 126e6
    assert b200.speed == pytest.approx(h100.speed * (2250 / 989.4) / (8.0 / 3.35))


@pytest.mark.parametrize("other", ["BFloat16[16777216]", "Half[16777216]"])
def test_operands_of_two_element_types_are_loaded_one_by_one(other: str) -> None:
    """Fewer bytes than a sum in 32 bits alone, and still slower."""
    x = "Float[16777216]"
    mixed, alike = (text("add_.Tensor", f"{x};{y}", x) for y in (other, x))

    assert bytes_of(mixed) < bytes_of(alike)
    assert cost(mixed) > cost(alike)


def test_inductors_kernels_load_vectors_of_any_element_type() -> None:
    """What it generates converts after it has loaded."""
    inputs = "Float[16777216];BFloat16[16777216]"
    mixed, alike = (
        FIELD.join(("inductor::triton_poi_fused_add_0", x, "", "traffic_bytes=167772160"))
        for x in (inputs, "Float[16777216];Float[16777216]")
    )

    assert cost(mixed) == cost(alike)


def test_a_copy_into_a_wider_type_is_slower_than_back() -> None:
    """The same bytes."""
    wide, narrow = "Float[16777216]", "BFloat16[16777216]"

    assert cost(copy(wide, narrow)) > 1.3 * cost(copy(narrow, wide))


def test_a_transposed_copy_is_slower_than_one_with_gaps() -> None:
    """Neighbours in the result that are no neighbours in the source take a line each."""
    into = "BFloat16[8192,4096]"
    transposed, gaps = copy(into, f"{into}@1,8192"), copy(into, f"{into}@8192,1")

    assert kind_of(parse_signature(transposed)) == "strided_copy"
    assert cost(transposed) > 2 * cost(gaps)


def test_a_copy_between_equal_layouts_is_one_through_memory() -> None:
    """Permuted as it may be."""
    permuted = "BFloat16[1,4,8192,1024]@33554432,1024,4096,1"
    straight = "BFloat16[1,4,8192,1024]"

    assert cost(copy(permuted, permuted)) == cost(copy(straight, straight))


def test_the_loss_reads_one_number_of_each_row() -> None:
    """Whatever the width; its gradient writes all of them, and reads none."""
    narrow, wide = (
        text("nll_loss_forward", f"Float[4096,{width}];Long[4096]", "Float[];Float[]")
        for width in (1_000, 100_000)
    )
    gradient = text(
        "nll_loss_backward",
        "Float[];Float[4096,1000];Long[4096];Float[]",
        "Float[4096,1000]",
    )

    assert cost(narrow) == cost(wide)
    assert bytes_of(gradient) == 4 * 4096 * 1000 + 8 * 4096 + 4


def test_a_scatter_moves_what_it_writes_and_not_its_target() -> None:
    """4,096 numbers into a table of 32,000 columns."""
    table = "Float[4096,32000]"
    signature = text("index_put_", f"{table};Long[4096];Long[4096];Float[4096]", table)

    assert bytes_of(signature) == 4096 * (8 + 8 + 4 + 4)


def test_a_scatter_that_adds_sorts_its_indices_first() -> None:
    """So that it adds in their order."""
    target, rows = "BFloat16[8192,768]", "BFloat16[16384,768]"
    writes, adds = (
        text("index_put_", f"{target};Long[16384];{rows}", target, f"accumulate={flag}")
        for flag in (0, 1)
    )

    assert cost(adds) > 3 * cost(writes)


def test_a_scatter_that_reduces_costs_what_one_that_adds_does() -> None:
    """Equal indices wait for each other in both."""
    rows = "Float[65536,1024]"
    adds, reduces = (
        cost(text(f"{name}_", f"{rows};Long[65536];{rows}", rows, "dim=0"))
        for name in ("index_add", "index_reduce")
    )

    assert reduces == adds


@pytest.mark.parametrize("change", [{"transposed": 0.0}, {"elements_per_s": -1.0}])
def test_rooflines_out_of_range_are_refused(change: dict[str, float]) -> None:
    """Each names its field."""
    with pytest.raises(UsageError, match=next(iter(change))):
        replace(MemoryRoofline(efficiency=0.9, base_ns=2_000), **change)


def test_a_cache_without_bytes_is_refused() -> None:
    """None stands for no cache."""
    with pytest.raises(UsageError, match="bytes and speed of a cache must be positive"):
        Cache(bytes=0, speed=2.0)
