"""Which of a kernel's configurations the autotuner takes without a GPU that measures them."""

from __future__ import annotations

from typing import Any

import torch
import triton

from prismscale.devices.null.triton_source.tuning import FLUSHED_BYTES
from support import op_log, triton_kernels

SIDES = ("BM", "BN", "BK")


def tuned(*tiles: tuple[int, int, int], **options: Any) -> Any:
    """The matmul kernel with a configuration for each size of tile."""
    configs = [triton.Config(dict(zip(SIDES, tile, strict=True))) for tile in tiles]
    return triton.autotune(configs=configs, key=["M", "N", "K"], **options)(triton_kernels.matmul)


def launch(kernel: Any, m: int, n: int, k: int) -> None:
    """Multiply two matrices."""
    a, b, c = (
        torch.empty(*sizes, dtype=torch.bfloat16, device="cuda")
        for sizes in ((m, k), (k, n), (m, n))
    )
    kernel[lambda named: (triton.cdiv(m, named["BM"]) * triton.cdiv(n, named["BN"]),)](
        a, b, c, m, n, k, PRECISION="tf32"
    )


def chosen(kernel: Any) -> tuple[int, ...]:
    """Tile of the configuration that the last launch took."""
    return tuple(kernel.best_config.kwargs[side] for side in SIDES)


def test_tiles_that_fit_are_taken() -> None:
    """Half of a larger tile would be multiplied for nothing."""
    kernel = tuned((128, 256, 64), (64, 128, 64), (64, 256, 64))
    launch(kernel, 64, 128, 512)
    assert chosen(kernel) == (64, 128, 64)


def test_of_equal_work_the_larger_tiles_are_taken() -> None:
    """They read each operand less often."""
    kernel = tuned((64, 64, 64), (128, 256, 64), (128, 128, 64))
    launch(kernel, 1024, 1024, 512)
    assert chosen(kernel) == (128, 256, 64)


def test_each_key_is_tuned_for_itself() -> None:
    """As Triton's own autotuner does."""
    kernel = tuned((64, 64, 64), (128, 128, 64))
    launch(kernel, 64, 64, 512)
    small = chosen(kernel)
    launch(kernel, 1024, 1024, 512)
    assert (small, chosen(kernel)) == ((64, 64, 64), (128, 128, 64))


def test_only_the_configuration_that_is_taken_runs() -> None:
    """Trials are no kernels of the program."""
    kernel = tuned((64, 64, 64), (128, 128, 64))
    records = op_log.ops_of(lambda: launch(kernel, 1024, 1024, 512))
    names = [record.signature.name for record in records]
    assert [name for name in names if name.startswith("triton::")] == ["triton::matmul.gemm"]


def test_pruned_configurations_are_not_tried() -> None:
    """The program's own function prunes them."""
    kernel = tuned(
        *((128, 256, 64), (64, 64, 64), (128, 128, 64)),
        prune_configs_by={"early_config_prune": lambda configs, *_, **__: configs[1:]},
    )
    launch(kernel, 1024, 1024, 512)
    assert chosen(kernel) == (128, 128, 64)


def test_a_performance_model_that_asks_the_driver_prunes_nothing() -> None:
    """There is no driver."""

    def perf_model(**_: Any) -> float:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    kernel = tuned(
        *((64, 64, 64), (128, 128, 64)), prune_configs_by={"perf_model": perf_model, "top_k": 1}
    )
    launch(kernel, 1024, 1024, 512)
    assert chosen(kernel) == (128, 128, 64)


def test_a_kernel_that_cannot_be_followed_takes_its_first_configuration() -> None:
    """No work is known of any."""
    configs = [triton.Config({}, num_warps=warps) for warps in (2, 8)]
    kernel = triton.autotune(configs=configs, key=[])(triton_kernels.unending)
    x = torch.zeros(4, dtype=torch.int32, device="cuda") + torch.empty(1, device="cuda").int()
    kernel[(1,)](x)
    assert kernel.best_config.num_warps == 2


def test_trials_hold_the_buffer_that_flushes_the_cache() -> None:
    """Triton's ``do_bench`` allocates it, and so it belongs to the peak."""
    kernel = tuned((64, 64, 64), (128, 128, 64))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launch(kernel, 64, 64, 64)
    assert torch.cuda.max_memory_allocated() >= before + FLUSHED_BYTES
    assert torch.cuda.memory_allocated() == before
