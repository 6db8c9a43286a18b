"""``python -m prismscale.devices.null.self_test``: one training step on the null device.

It compiles the extension if needed, and prints as JSON the results that ``prismscale doctor``
reads.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import NoReturn

from prismscale.devices.null.build import build_extension, extension_path
from prismscale.devices.null.gpus import device_spec
from prismscale.errors import PrismscaleError
from prismscale.processes.children import end_now

_GPU = "h100-sxm"


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """Results of the step."""

    peak_bytes: int
    build_s: float
    """Seconds that compiling the extension took; 0 if it was compiled before."""


def main() -> NoReturn:
    """Run the step. The exit code is 0, or that of the error printed to standard error."""
    try:
        is_built, began = extension_path().exists(), time.monotonic()
        build_extension()
        build_s = 0.0 if is_built else time.monotonic() - began
        print(json.dumps(asdict(SelfTest(peak_bytes=_train(), build_s=build_s))))
    except PrismscaleError as error:
        print(error, file=sys.stderr)
        end_now(error.exit_code)
    # Autograd's threads, one for each of the node's devices, still exist, and the interpreter's
    # exit races with them. This check crashed once, for an unknown reason. Ranks end this way and
    # do not.
    end_now(0)


def _train() -> int:
    """Return the peak bytes of a step of a linear layer with attention, clipping and AdamW."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from prismscale.devices.null.runtime import activate

    activate(device_spec(_GPU))
    layer = torch.nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    heads = layer(torch.randn(4, 128, 1024, device="cuda", dtype=torch.bfloat16))
    heads = heads.view(4, 128, 16, 64).transpose(1, 2)
    scaled_dot_product_attention(heads, heads, heads, is_causal=True).float().sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main()
