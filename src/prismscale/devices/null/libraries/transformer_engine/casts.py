"""Casts to and from floats of 8 and 4 bits, with their scales.

Source: pytorch/csrc/extensions/cast.cpp, recipe.cpp and quantizer.cpp of Transformer Engine 2.2
to 2.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.multi_tensor import Lists, launches_of
from prismscale.devices.null.libraries.transformer_engine.enums import torch_dtype
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    CURRENT,
    DELAYED,
    NVFP4,
    buffers,
    create,
    empty_as,
    operand,
    recipe_of,
    rotates_in_one_kernel,
    shape_of,
    update,
)
from prismscale.devices.null.libraries.transformer_engine.versions import is_since

_TE = "transformer_engine::"


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return ``tensor`` cast as ``quantizer`` wants it, in ``output`` if that is given."""
    source = tensor.contiguous()
    if output is None:
        output = create(quantizer, source.shape, source.dtype)
    else:
        update(quantizer, output)
    known = quantizer.amax if getattr(quantizer, "use_existing_amax", False) else None
    cast_into(source, output, quantizer, amax=known)
    return output


def cast_into(source: Tensor, output: Any, quantizer: Any, *, amax: Tensor | None = None) -> None:
    """Launch the kernels that fill ``output``; ``amax`` is the largest value, if it is known."""
    if not source.numel():
        return
    recipe = recipe_of(quantizer)
    if recipe == NVFP4:
        _cast_to_fp4(source, output, quantizer)
        return
    reads = [source]
    if recipe == CURRENT:
        reads.append(_current_scale(source, quantizer, amax))
    elif recipe == DELAYED:
        reads.append(quantizer.scale)
    writes = buffers(output) + ([quantizer.amax] if recipe == DELAYED else [])
    twice = sum(buffer.numel() >= source.numel() for buffer in writes) > 1
    launch(
        f"{_TE}quantize", memory("strided_copy" if twice else "copy"), reads=reads, writes=writes
    )


def _cast_to_fp4(source: Tensor, output: Any, quantizer: Any) -> None:
    """Compute the largest magnitudes over the ranks that share them, then cast.

    If columns are rotated randomly, their magnitudes are those after the rotation. The cast is one
    kernel if the GPU rotates on the way.
    """
    amaxes = [a for a in (output._amax_rowwise, output._amax_columnwise) if a is not None]
    name = "hadamard_transform_amax" if quantizer.with_rht else "compute_amax"
    # The first of the two launches sets the results to zero.
    launch(f"{_TE}{name}", memory("reduction", launches=2), reads=[source], writes=amaxes)
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        dist.all_reduce_coalesced(amaxes, op=dist.ReduceOp.MAX, group=group)
    if quantizer.stochastic_rounding:
        state = empty_as([2], torch.int64)
        launch(f"{_TE}philox_unpack", memory("fill"), writes=[state])
    rows = operand(output, rowwise=True) if quantizer.rowwise_usage else []
    columns = operand(output, rowwise=False) if quantizer.columnwise_usage else []
    if not quantizer.with_rht or rotates_in_one_kernel(quantizer, source.shape):
        cost = memory("strided_copy" if rows and columns else "copy")
        reads, writes = [source, *amaxes], [*rows, *columns]
        launch(f"{_TE}quantize", cost, reads=reads, writes=writes)
        return
    turned = empty_as((source.shape[-1], source.numel() // source.shape[-1]), source.dtype)
    if rows:
        launch(f"{_TE}quantize", memory("copy"), reads=[source, *amaxes], writes=rows)
    if columns:
        cost = memory("strided_copy")
        launch(f"{_TE}hadamard_transform", cost, reads=[source], writes=[turned])
        launch(f"{_TE}quantize", memory("copy"), reads=[turned, *amaxes], writes=columns)


def share_amax(amax: Tensor, quantizer: Any) -> None:
    """Reduce ``amax`` over the ranks that share a scale, if there are such ranks."""
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)


def _current_scale(source: Tensor, quantizer: Any, amax: Tensor | None) -> Tensor:
    """Return the scale of the current values of ``source``, over the ranks that share it.

    Up to 2.15 the quantizer has a tensor for it; later the tensor lasts as long as the cast.
    """
    if is_since(2, 16):
        both = empty_as([1 if amax is not None else 2], torch.float32)
        scale, own_amax = both[-1:], both[:1]
    else:
        scale, own_amax = quantizer.scale, quantizer.amax
    if amax is None:
        amax = own_amax
        # The first of the two launches sets the result to zero.
        cost = memory("reduction", launches=2)
        launch(f"{_TE}compute_amax", cost, reads=[source], writes=[amax])
    share_amax(amax, quantizer)
    cost = memory("pointwise")
    launch(f"{_TE}compute_scale_from_amax", cost, reads=[amax], writes=[scale])
    return scale


def unquantized_with_amax(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return tensors for a result that is cast later, and for its largest value."""
    if is_since(2, 16):
        amax = torch.zeros(1, dtype=torch.float32, device="cuda")
    else:
        amax = quantizer.amax.zero_()
    return empty_as(shape, dtype), amax


def dequantize(tensor: Any, dtype: int) -> Tensor:
    """Return ``tensor`` in higher precision."""
    output = empty_as(shape_of(tensor), torch_dtype(dtype))
    launch(f"{_TE}dequantize", memory("copy"), reads=_one_side(tensor), writes=[output])
    return output


def _one_side(tensor: Any) -> list[Tensor]:
    """Return the rows of a quantized tensor and their scales, or its columns where it has none."""
    found = operand(tensor, rowwise=True)
    return found if any(b is not None for b in found) else operand(tensor, rowwise=False)


def multi_tensor_quantize(tensors: Sequence[Tensor], quantizers: Sequence[Any]) -> list[Any]:
    """Return the tensors, each cast with its own quantizer."""
    outputs = [create(q, t.shape, t.dtype) for t, q in zip(tensors, quantizers, strict=True)]
    _cast_all(tensors, outputs, quantizers)
    return outputs


def split_quantize(
    tensor: Tensor, sections: Sequence[int], quantizers: Sequence[Any], *_: Any, **__: Any
) -> list[Any]:
    """Return the rows of ``tensor`` in ``sections``, each cast with its own quantizer."""
    parts = list(tensor.contiguous().split(list(sections)))
    return multi_tensor_quantize(parts, quantizers)


def _cast_all(tensors: Sequence[Tensor], outputs: Sequence[Any], quantizers: Sequence[Any]) -> None:
    fused = all(
        recipe_of(q) == DELAYED and o._data is not None and o._transpose is not None
        for q, o in zip(quantizers, outputs, strict=True)
    )
    if not fused:
        for source, output, quantizer in zip(tensors, outputs, quantizers, strict=True):
            cast_into(source, output, quantizer)
        return
    launch(
        f"{_TE}multi_cast_transpose",
        memory("strided_copy"),
        reads=[t for t in tensors if t.numel()],
        writes=[buffer for output in outputs for buffer in buffers(output)],
    )


def fused_multi_quantize(
    tensors: Sequence[Tensor], outputs: Sequence[Any] | None, quantizers: Sequence[Any], _: Any
) -> list[Any]:
    """As :func:`multi_tensor_quantize`, for up to 2.2: into ``outputs`` if these are given."""
    if outputs is None:
        return multi_tensor_quantize(tensors, quantizers)
    _cast_all(tensors, outputs, quantizers)
    return list(outputs)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pinned: bool
) -> Any:
    """Return what a quantizer's ``make_empty`` gives since 2.16."""
    if device.type != "cuda":
        raise NotImplementedError(
            "prismscale's stand-in for Transformer Engine has no quantized tensors in the host's "
            "memory; run without offloading them"
        )
    return create(quantizer, shape, dtype)


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """Compute the largest magnitude."""
    launch(
        f"{_TE}compute_amax",
        memory("reduction", launches=2),
        reads=[tensor.contiguous()],
        writes=[amax],
    )


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], *_: Any
) -> None:
    """Advance the histories of delayed scaling, and compute the scales of the next step."""
    launch(
        f"{_TE}fused_amax_and_scale_update",
        memory("foreach"),
        reads=[reduced, *histories],
        writes=[*histories, *scales],
    )


def fp8_transpose(tensor: Tensor, dtype: int, *, out: Tensor | None = None) -> Tensor:
    """Move the last dimension to the front."""
    if out is None:
        out = empty_as((tensor.shape[-1], *tensor.shape[:-1]), torch.uint8)
    if tensor.numel():
        launch(f"{_TE}transpose", memory("strided_copy"), reads=[tensor], writes=[out])
    return out


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Swap the first two dimensions."""
    source = tensor.contiguous()
    if out is None:
        out = empty_as((source.shape[1], source.shape[0], *source.shape[2:]), source.dtype)
    launch(f"{_TE}swap_first_dims", memory("copy"), reads=[source], writes=[out])
    return out


def partial_amax(tensor: Tensor, *results: Any) -> None:
    """Compute the largest magnitudes of the blocks of a weight of which a rank has a part."""
    writes = [result for result in results if isinstance(result, Tensor)]
    launch(f"{_TE}compute_partial_amax", memory("reduction"), reads=[tensor], writes=writes)


def partial_cast(tensor: Tensor, *arguments: Any) -> None:
    """Cast the part of a weight that a rank has; ``arguments`` are outputs, then scales."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    half = len(tensors) // 2
    launch(
        f"{_TE}partial_cast",
        memory("copy", n_bytes=tensor.nbytes + tensor.numel() * half),
        reads=[tensor, *tensors[half:]],
        writes=tensors[:half],
    )


def scales_of_amaxes(chunk_size: int, noop: Tensor | None, lists: Lists, *_: Any) -> None:
    """Compute the scales (and their inverses) of many weights from their largest magnitudes."""
    cost = memory("foreach", launches=launches_of(lists, chunk_size))
    writes = [tensor for each in lists[1:] for tensor in each]
    launch(f"{_TE}multi_tensor_compute_scale", cost, reads=lists[0], writes=writes)


FUNCTIONS = {
    "quantize": quantize,
    "dequantize": dequantize,
    "multi_tensor_quantize": multi_tensor_quantize,
    "split_quantize": split_quantize,
    "fused_multi_quantize": fused_multi_quantize,
    "create_empty_quantized_tensor": create_empty_quantized_tensor,
    "compute_amax": compute_amax,
    "fused_amax_and_scale_update_after_reduction": fused_amax_and_scale_update_after_reduction,
    "fp8_transpose": fp8_transpose,
    "swap_first_dims": swap_first_dims,
    "multi_tensor_compute_scale_and_scale_inv": scales_of_amaxes,
    "multi_tensor_compute_scale_inv_e8m0": scales_of_amaxes,
    "fp8_block_scaling_compute_partial_amax": partial_amax,
    "mxfp8_scaling_compute_partial_amax": partial_amax,
    "fp8_block_scaling_partial_cast": partial_cast,
    "mxfp8_scaling_partial_cast": partial_cast,
}
