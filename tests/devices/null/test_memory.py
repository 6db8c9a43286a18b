"""Memory of real programs on the null device, as torch.cuda reports it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from prismscale.devices.null import runtime
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.memory import memory_stats
from support.allocator import CachingAllocator
from support.null_program import null_program

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def test_allocated_bytes_follow_references() -> None:
    """Memory is held exactly as long as the program refers to it; the peak stays."""
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated() - before
    del tensor

    assert held == 10 * MIB
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 10 * MIB


def test_statistics_are_those_of_the_documented_model() -> None:
    """The same allocations replayed in the Python model reserve the same bytes."""
    base = torch.cuda.memory_stats()
    model = CachingAllocator(80 << 30)
    keep = []
    for size in (100, 3 * MIB, 700, 30 * MIB, 5 * MIB, MIB):
        keep.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        model.malloc(size)
    stats = torch.cuda.memory_stats()

    for name in ("allocated_bytes", "requested_bytes"):
        key = f"{name}.all.current"
        assert stats[key] - base[key] == model.memory_stats()[key]
    assert stats["num_ooms"] == 0


def test_exceeding_the_device_raises_torchs_error() -> None:
    """An allocation that does not fit raises torch.OutOfMemoryError with CUDA's text."""
    text = r"CUDA out of memory\. Tried to allocate 90\.00 GiB"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        torch.empty(90 << 30, dtype=torch.uint8, device="cuda")

    assert torch.cuda.memory_stats()["num_ooms"] >= 1


def test_out_of_memory_can_be_survived() -> None:
    """After an out-of-memory error the program goes on with less."""
    big = torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    del big

    assert torch.empty(30 << 30, dtype=torch.uint8, device="cuda").numel() == 30 << 30


def test_live_blocks_name_the_op_that_made_them() -> None:
    """The largest live block is the matrix product's result."""
    left = torch.empty(4096, 256, device="cuda", dtype=torch.bfloat16)
    product = left @ left.t()
    largest = memory_stats.live_blocks(runtime.active().library, 0)

    assert "aten::mm" in [block.made_by for block in largest if block.size_bytes == product.nbytes]


def test_a_product_takes_the_blas_workspace_once() -> None:
    """The first matrix product on a stream holds 32 MiB of cuBLAS workspace; the next none."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        matrix = torch.empty(64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        first = matrix @ matrix
        after_first = torch.cuda.memory_allocated()
        second = matrix @ matrix

    assert after_first - before == 32 * MIB + first.nbytes
    assert torch.cuda.memory_allocated() - after_first == second.nbytes


@pytest.mark.parametrize(
    ("gpu", "version", "kib"),
    [
        ("a100-80g", "2.13.0", 8_320),
        ("h100-sxm", "2.11.0", 32_768),
        ("b200", "2.11.0", 8_320),
        ("b200", "2.13.0+cpu", 32_768),
    ],
)
def test_the_blas_workspace_is_that_of_gpu_and_torch(gpu: str, version: str, kib: int) -> None:
    """Blackwell has Hopper's since torch 2.12."""
    assert device_spec(gpu).blas_workspace_bytes(version) == kib * 1024


GROWING = """
import os, torch
{before}
for step in range(1, 4):
    x = torch.empty(step << 26, dtype=torch.uint8, device="cuda")
    del x
print(torch.cuda.memory_reserved() >> 20)
"""
"""A program whose blocks grow: 64, 128 and 192 MiB, one at a time; an expandable segment has pages
of 20."""


@pytest.mark.parametrize(
    ("before", "mib"),
    [
        ("", 384),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'", 200),
        ("torch.cuda.memory._set_allocator_settings('expandable_segments:True')", 200),
        (
            "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:False'\n"
            "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'",
            384,
        ),
        ("torch.cuda.init(); os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'", 384),
    ],
)
def test_allocator_settings_count_until_cuda_starts(before: str, mib: int) -> None:
    """Launchers set them after torch is imported; only a call changes them later."""
    assert null_program(GROWING.format(before=before)) == f"{mib}\n"


CHANGING = """
import torch
torch.cuda.set_per_process_memory_fraction(0.5)
for step in range(1, 5):
    x = torch.empty(step << 26, dtype=torch.uint8, device="cuda")
    del x
    if step == 2:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
print(torch.cuda.memory_reserved() >> 20)
try:
    torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("half of it")
"""


def test_a_call_changes_the_allocators_settings_in_between() -> None:
    """What was reserved before stays (64 and 128 MiB, beside 256 in pages of 20); so does a memory
    fraction."""
    assert null_program(CHANGING) == "452\nhalf of it\n"


def test_record_stream_delays_reuse() -> None:
    """A block used on a side stream is active after its free, until the host synchronizes."""
    side = torch.cuda.Stream()
    tensor = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.add_(1)
    tensor.record_stream(side)
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    del tensor
    waiting = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    after = torch.cuda.memory_stats()["active_bytes.all.current"]

    assert waiting == before
    assert before - after >= 8 * MIB


def test_mem_get_info_counts_what_others_hold() -> None:
    """Free memory is the total less the context and what torch reserved."""
    spec = runtime.active().spec
    free, total = torch.cuda.mem_get_info()

    assert total == spec.total_memory_bytes
    assert free == total - spec.context_bytes - torch.cuda.memory_reserved()


def test_the_snapshot_adds_up() -> None:
    """Segments of memory_stats._snapshot sum to the reserved bytes."""
    tensor = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    segments = [s for s in torch.cuda.memory._snapshot()["segments"] if s["device"] == 0]

    assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved()
    assert sum(segment["allocated_size"] for segment in segments) == torch.cuda.memory_allocated()
    assert tensor.data_ptr() in [block["address"] for s in segments for block in s["blocks"]]


def test_a_memory_fraction_is_a_limit() -> None:
    """set_per_process_memory_fraction lowers what may be reserved."""
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(("tokens", "sums"), [(1024, 0), (4096, 4096 // 10 + 4096)])
def test_the_gradient_of_an_embedding_sums_in_float32(tokens: int, sums: int) -> None:
    """Of many tokens: a row for each that is different, and one for each ten."""
    weight = torch.empty(8192, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    indices = torch.empty(tokens, dtype=torch.int64, device="cuda")
    rows = torch.nn.functional.embedding(indices, weight)
    grad = torch.empty_like(rows)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows.backward(grad)
    taken = torch.cuda.max_memory_allocated() - before - weight.nbytes
    # The indices are sorted beside it: some lists of 8 bytes each.
    assert sums * 256 * 4 <= taken <= sums * 256 * 4 + 10 * 8 * tokens * bool(sums)


@pytest.mark.parametrize(
    ("shape", "each"),
    [
        ((1 << 20,), 8 + 4 + 8),  # positions; keys and values once more
        ((16, 1 << 16), 8 + 8 + 4 + 4 + 8),  # rows are numbered, and sorted as one
        ((256, 1 << 12), 0),  # short rows, in place
        ((256, 1 << 13), 8 + 4 + 8),
    ],
)
def test_a_sort_takes_cubs_workspace(shape: tuple[int, ...], each: int) -> None:
    """Bytes for each float, beside the sorted values and their positions."""
    tensor = torch.empty(shape, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor.sort()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx((4 + 8 + each) * tensor.numel(), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "staged_bytes"),
    [
        # The gradient of a bias: 32 blocks for an output, 32 threads of 4 outputs in each.
        ((2048, 3840), 0, torch.float16, 4 * 3840 * 32 * 128 + 512),
        ((2048, 7680), 0, torch.bfloat16, 4 * 7680 * 32 * 128 + 512),
        ((2048, 30_592), 0, torch.bfloat16, 4 * 30_592 * 9 * 128 + 1024),
        ((8, 256, 3840), (0, 1), torch.float32, 4 * 3840 * 32 * 128 + 512),
        ((256, 3840), 0, torch.bfloat16, 0),  # 64 values for a thread are few
        ((2048, 3840), 1, torch.bfloat16, 0),  # a row for a block
        ((4096, 4096), None, torch.float32, 2560 + 512),  # one output, 528 blocks
        ((8192, 3839), 0, torch.bfloat16, 2_457_088 + 512),  # rows not aligned: 5 blocks of 32
    ],
)
def test_a_sum_over_thread_blocks_stages_its_parts(
    shape: tuple[int, ...], dim: int | tuple[int, ...] | None, dtype: torch.dtype, staged_bytes: int
) -> None:
    """By ATen's setReduceConfig on 132 multiprocessors, in blocks of the allocator."""
    tensor = torch.empty(shape, device="cuda", dtype=dtype)
    assert workspace_bytes(lambda: tensor.sum(dim)) == staged_bytes


def test_a_sum_of_truth_values_copies_them_to_integers_first() -> None:
    """Eight bytes for each."""
    mask = torch.empty(1 << 20, 4, device="cuda", dtype=torch.bool)
    assert workspace_bytes(lambda: mask.sum(1)) == 8 * mask.numel()


def test_a_mean_of_half_precision_in_full_copies_nothing() -> None:
    """The kernel reads 16 bits and writes 32."""
    tensor = torch.empty(1 << 20, 4, device="cuda", dtype=torch.bfloat16)
    assert workspace_bytes(lambda: tensor.mean(1, dtype=torch.float32)) == 0


@pytest.mark.parametrize("reduce", [torch.sum, torch.argmax, torch.amax, torch.var])
def test_a_single_number_has_a_dimension_to_reduce(reduce: Callable[..., torch.Tensor]) -> None:
    """As torch has it: dimension 0, and nothing is staged."""
    number = torch.empty((), device="cuda")
    assert workspace_bytes(lambda: reduce(number, 0)) == 0


def workspace_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Of the allocator, at the highest, beside what the result takes."""
    torch.cuda.reset_peak_memory_stats()
    result = call()
    held = torch.cuda.memory_allocated()
    del result
    return torch.cuda.max_memory_allocated() - held
