"""Stand-in for Mamba's ``selective_scan_cuda``, under the library's own Python code.

The state-space duality of Mamba-2 needs no stand-in: its kernels are Triton kernels, and run like
the program's own. Source: csrc/selective_scan/selective_scan.cpp of mamba-ssm 2.3.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION = "selective_scan_cuda"
_SPACE = "mamba_ssm::"
_CHUNK = 2048
"""Number of positions after which the state is stored."""


def stand_in() -> StandIn:
    """Return the stand-in."""
    return StandIn(
        name="Mamba",
        namespace="mamba_ssm",
        modules={_EXTENSION: _make_extension},
        python="mamba_ssm",
        distribution="mamba-ssm",
    )


def _make_extension() -> ModuleType:
    content = {"fwd": selective_scan_fwd, "bwd": selective_scan_bwd}
    return module_of(_EXTENSION, content, library="Mamba")


def selective_scan_fwd(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """Return output, states and, with a gate ``z``, the gated output.

    ``u`` has the shape (batch, channels, length).
    """
    batch, channels, length = u.shape
    gated = [] if z is None else [torch.empty_like(z)]
    out = torch.empty_like(delta)
    chunks = -(-length // _CHUNK)
    states = u.new_empty((batch, channels, chunks, 2 * a.shape[1]), dtype=a.dtype)
    launch(
        f"{_SPACE}selective_scan_fwd",
        memory("scan"),
        reads=[u, delta, a, b, c, d, z, delta_bias],
        writes=[out, states, *gated],
    )
    return [out, states, *gated]


def selective_scan_bwd(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    grad: Tensor,
    states: Tensor | None,
    out: Tensor | None,
    dz: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Tensor | None]:
    """Return gradients in argument order, then that of ``z`` and a recomputed output."""
    last: list[Tensor] = []
    if z is not None:
        last.append(torch.empty_like(z) if dz is None else dz)
        if recompute_out_z and out is not None:
            last.append(torch.empty_like(out))
    du, ddelta, da = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    db, dc = (_zeros_of_matrix(matrix) for matrix in (b, c))
    dd = None if d is None else torch.zeros_like(d)
    dbias = None if delta_bias is None else torch.zeros_like(delta_bias)
    launch(
        f"{_SPACE}selective_scan_bwd",
        memory("scan"),
        reads=[u, delta, a, b, c, d, z, delta_bias, grad, states, out],
        writes=[du, ddelta, da, db, dc, dd, dbias, *last],
    )
    return [du, ddelta, da, db.to(b.dtype), dc.to(c.dtype), dd, dbias, *last]


def _zeros_of_matrix(matrix: Tensor) -> Tensor:
    """Return zeros for a matrix's gradient, in float32 if the matrix varies along the sequence."""
    varies = matrix.dim() >= 3
    return torch.zeros_like(matrix, dtype=torch.float32 if varies else None)
