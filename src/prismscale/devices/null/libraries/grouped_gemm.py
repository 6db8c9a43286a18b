"""Stand-in for grouped_gemm: expert products of local megatron-core layers and of MegaBlocks.

``batch_sizes`` holds the number of rows of each expert. If it lies on the device, all experts get
equal shares of the rows. Source: csrc/ops.cu, grouped_gemm.cu and permute.cu of
fanshiqing/grouped_gemm (1.1.4, 2025-12).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from prismscale.devices.null.libraries import token_permutation
from prismscale.devices.null.libraries.launches import gemm, launch, memory
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_NAME, _EXTENSION = "grouped_gemm", "grouped_gemm_backend"


def stand_in() -> StandIn:
    """Return the stand-in, which applies where the package's Python code is installed."""
    return StandIn(
        name=_NAME,
        namespace=_NAME,
        modules={_EXTENSION: _module},
        python=_NAME,
        distribution="nv_grouped_gemm",
    )


def _module() -> ModuleType:
    functions = (gmm, sinkhorn, permute, unpermute, unpermute_bwd)
    return module_of(_EXTENSION, {f.__name__: f for f in functions}, library=_NAME)


def gmm(
    a: Tensor, b: Tensor, out: Tensor, batch_sizes: Tensor, trans_a: bool, trans_b: bool
) -> None:
    """Multiply each expert's rows of ``a`` by its matrix in ``b``.

    With ``trans_a`` the products are the gradients of the experts' weights.
    """
    rows = _rows_of_experts(batch_sizes, a.shape[0])
    if trans_a:
        products = [(a.shape[1], b.shape[1], count) for count in rows]
    else:
        products = [(count, out.shape[1], a.shape[1]) for count in rows]
    batches = Counter(product for product in products if all(product))
    if batches:
        cost = gemm(*((count, *product) for product, count in batches.items()))
        launch(f"{_NAME}::gmm", cost, reads=[a, b], writes=[out])


def _rows_of_experts(batch_sizes: Tensor, total: int) -> list[int]:
    if not batch_sizes.is_cuda:
        return [int(size) for size in batch_sizes.tolist()]
    each, rest = divmod(total, batch_sizes.numel())
    return [each + (expert < rest) for expert in range(batch_sizes.numel())]


def sinkhorn(cost: Tensor, tolerance: float = 0.0001) -> Tensor:
    """Return balanced routes; costed as one pass over memory, however many passes there are."""
    out = cost.new_empty(cost.shape)
    launch(f"{_NAME}::sinkhorn", memory("reduction"), reads=[cost], writes=[out])
    return out


def permute(
    tokens: Tensor,
    indices: Tensor,
    out_tokens: int,
    workspace: Sequence[Tensor],
    most_tokens: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Call :func:`~prismscale.devices.null.libraries.token_permutation.permute`."""
    return token_permutation.permute(_NAME, tokens, indices, out_tokens, workspace, most_tokens)


def unpermute(tokens: Tensor, places: Tensor, probs: Tensor, count: int, topk: int) -> Tensor:
    """Return the weighted sum of each token's copies."""
    return token_permutation.unpermute(_NAME, tokens, places, probs, count)


def unpermute_bwd(
    grad: Tensor, tokens: Tensor, places: Tensor, probs: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the copies and of their weights."""
    return token_permutation.unpermute_backward(_NAME, grad, tokens, places, probs)
