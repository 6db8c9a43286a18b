"""What lasts of a kernel's speed when it runs on and on: power, clocks and time by the second.

    python bench/gpu/sustained.py --json PATH [--seconds 12]

Each work starts after some idle seconds, so that its first calls are a burst. Operands are random:
zeros take less power. Run it alone on the GPU.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import pynvml
import torch
import torch.nn.functional as F
from timing import save

IDLE_S = 2.0
BATCH_S = 0.02


def product(m: int, n: int, k: int) -> Callable[[], object]:
    """A bf16 product of random operands."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
    return lambda: a @ b


def layer() -> Callable[[], object]:
    """Forward and backward of a layer of Llama-3 8B on 8,192 tokens, without gradients' sums."""
    tokens, hidden, ffn, heads = 8192, 4096, 14336, 32
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(1, tokens, hidden, **options)
    qkv, out = (torch.randn(n, hidden, **options) / 64 for n in (hidden + 2048, hidden))
    up, down = torch.randn(ffn, hidden, **options) / 64, torch.randn(hidden, ffn, **options) / 120
    for weight in (qkv, out, up, down):
        weight.requires_grad_()

    def run() -> object:
        y = F.rms_norm(x, (hidden,))
        q, k, v = F.linear(y, qkv).view(1, tokens, -1, 128).transpose(1, 2).split((heads, 8, 8), 1)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        z = x + F.linear(z.transpose(1, 2).reshape(1, tokens, hidden), out)
        w = F.rms_norm(z, (hidden,))
        gate = F.linear(w, up)
        result = z + F.linear(F.silu(gate) * F.linear(w, up), down)
        return torch.autograd.grad(result, (qkv, out, up, down), result)

    return run


def adding() -> Callable[[], object]:
    """Bandwidth alone."""
    a, b = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    return lambda: torch.add(a, b, out=b)


WORKS = {
    "mm 8192 x 8192 x 8192": lambda: product(8192, 8192, 8192),
    "mm 8192 x 4096 x 14336": lambda: product(8192, 4096, 14336),
    "mm 2048 x 2048 x 2048": lambda: product(2048, 2048, 2048),
    "layer of 8B, forward and backward": layer,
    "add of 256 Mi floats": adding,
}


@contextmanager
def watched(samples: list[dict[str, float]]) -> Iterator[None]:
    """NVML's power, clocks and temperature, 20 times a second."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            samples.append(
                {
                    "at_s": time.monotonic(),
                    "watts": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                    "sm_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
                    "memory_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
                    "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
                    "throttled": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
                }
            )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(run: Callable[[], object], seconds: float) -> dict[str, object]:
    """Time of a call, batch by batch, from idle on; the queue never runs empty."""
    run()
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    began = time.monotonic()
    run()
    torch.cuda.synchronize()
    calls = max(1, round(BATCH_S / (time.monotonic() - began)))
    time.sleep(IDLE_S)
    samples: list[dict[str, float]] = []
    events = []
    with watched(samples):
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
            for _ in range(calls):
                run()
            if len(events) > 3:
                events[-3].synchronize()
        torch.cuda.synchronize()
    each = [a.elapsed_time(b) * 1e6 / calls for a, b in pairwise(events)]
    last = each[len(each) // 2 :]
    return {
        "calls in a batch": calls,
        "burst_ns": median(each[:5]),
        "sustained_ns": median(last),
        "batch_ns": [round(ns) for ns in each],
        "samples": [{**s, "at_s": round(s["at_s"] - began, 3)} for s in samples],
    }


def main() -> None:
    """Measure all, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=12)
    options = parser.parse_args()
    found: dict[str, object] = {}
    for name, make in WORKS.items():
        figures = measure(make(), options.seconds)
        found[name] = figures
        torch.cuda.empty_cache()
        busy = figures["samples"][len(figures["samples"]) // 2 :]
        print(
            f"{name}: burst {figures['burst_ns'] / 1e3:.1f} us, "
            f"sustained {figures['sustained_ns'] / 1e3:.1f} us, "
            f"{median(s['watts'] for s in busy):.0f} W, {median(s['sm_mhz'] for s in busy)} MHz",
            flush=True,
        )
    save(options.json, found)


if __name__ == "__main__":
    main()
