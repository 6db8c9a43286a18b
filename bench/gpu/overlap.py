"""What a copy on some multiprocessors takes from computation beside it, and back.

    python bench/gpu/overlap.py --json PATH

A copy within device memory by 4 to 32 blocks of 512 threads stands for a collective's kernel, which
reads and writes memory with as many. It runs on a stream of higher priority, as NCCL's do where a
program asks for it, from before the computation until after it. Run it alone on the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from timing import device_ns, save

BLOCKS = (4, 8, 16, 24, 32)
REPEATS = 5
CHUNK = 8192


@triton.jit
def copy_kernel(source, target, chunks, held, CHUNK: tl.constexpr):
    """Each block copies every n-th chunk, round and round in what the buffers hold."""
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        at = (chunk % held).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        tl.store(target + at, tl.load(source + at))


def pause() -> None:
    """Let the device be idle, and then wait while the host issues what comes next."""
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)


class Copy:
    """A copy by some blocks, long enough to lie beside what is measured."""

    def __init__(self, n_bytes: int) -> None:
        self.source = torch.randn(n_bytes // 4, device="cuda")
        self.target = torch.empty_like(self.source)
        self.stream = torch.cuda.Stream(priority=-1)

    def start_now(self, blocks: int, n_bytes: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Issue it to an idle device, behind a pause in which the host issues what comes beside it;
        events before and after."""
        pause()
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.start(blocks, n_bytes)

    def start(self, blocks: int, n_bytes: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Issue it; events before and after."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            began.record()
            chunks, held = (n // 4 // CHUNK for n in (n_bytes, self.source.nbytes))
            copy_kernel[(blocks,)](
                self.source, self.target, chunks, held, CHUNK=CHUNK, num_warps=16
            )
            ended.record()
        return began, ended


def works() -> dict[str, Callable[[], object]]:
    """What is computed beside the copy."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(8192, 4096, **bf16), torch.randn(4096, 14336, **bf16)
    q, k, v = (torch.randn(1, 32, 8192, 128, **bf16) for _ in range(3))
    x = torch.randn(8192, 14336, **bf16)
    return {
        "mm 8192 x 14336 x 4096": lambda: a @ b,
        "attention, 8,192 tokens, 32 heads of 128": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        "silu of 8192 x 14336": lambda: F.silu(x),
    }


def timed(run: Callable[[], object], calls: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Issue the calls; events before and after."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(calls):
        run()
    ended.record()
    return began, ended


def call_ms(
    run: Callable[[], object], calls: int, beside: Callable[[], torch.cuda.Event | None]
) -> float:
    """Milliseconds of a call, after :func:`pause` in either case, so that clocks are as fast.

    Args:
        run: the call.
        calls: how many are timed together.
        beside: pauses, and starts what runs beside them; returns the event of its end, and None
            where there is nothing.

    Returns:
        The median; not a number where what runs beside ended before the calls.
    """
    times = []
    for _ in range(REPEATS):
        other = beside()
        torch.cuda._sleep(200_000)
        began, ended = timed(run, calls)
        torch.cuda.synchronize()
        inside = other is None or ended.elapsed_time(other) >= 0
        times.append(began.elapsed_time(ended) / calls if inside else float("nan"))
    return median(times)


def copy_rate(copy: Copy, blocks: int, n_bytes: int, run: Callable[[], object] | None) -> float:
    """Bytes a second that the copy moves (read and written), while ``run`` is repeated."""
    began, ended = copy.start_now(blocks, n_bytes)
    if run is not None:
        while not ended.query():
            for _ in range(20):
                run()
    torch.cuda.synchronize()
    return 2 * n_bytes / (began.elapsed_time(ended) / 1e3)


def main() -> None:
    """Measure all, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    copy = Copy(4 << 30)
    copy.start(32, 1 << 26)
    rows = []
    rates = {}
    for blocks in BLOCKS:
        rates[blocks] = copy_rate(copy, blocks, 1 << 29, None)
        print(f"{blocks} blocks copy {rates[blocks] / 1e9:.0f} GB/s alone", flush=True)
    for name, run in works().items():
        run()
        once_ms = device_ns(run, calls=10) / 1e6
        calls = max(5, round(10 / once_ms))
        once_ms = call_ms(run, calls, pause)
        for blocks in BLOCKS:
            wanted = int(rates[blocks] / 2 * once_ms * calls * 3 / 1e3)
            n_bytes = max(1 << 26, wanted // (4 * CHUNK) * 4 * CHUNK)
            both_ms = call_ms(run, calls, lambda b=blocks, n=n_bytes: copy.start_now(b, n)[1])
            rate = copy_rate(copy, blocks, n_bytes, run)
            row = {
                "work": name,
                "blocks": blocks,
                "alone_ms": once_ms,
                "beside_ms": both_ms,
                "slower": both_ms / once_ms,
                "copy_alone_bytes_per_s": rates[blocks],
                "copy_beside_bytes_per_s": rate,
            }
            rows.append(row)
            print(
                f"{name}, {blocks} blocks: x{row['slower']:.3f}; "
                f"copy x{rate / rates[blocks]:.2f} of {rates[blocks] / 1e9:.0f} GB/s",
                flush=True,
            )
    save(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
