"""User buffers: tensor-parallel communication while products run (``--tp-comm-overlap``).

Members of a group write into each other's buffers over NVLink. Here a collective of their process
group represents this, with the cost and the name of the group's NCCL communicator; on the cluster
the library's own communication takes its place. Chunks of a product are launched one after another,
as in the library. They use all multiprocessors: those that the library gives to communication, up
to 16, are not subtracted.

Sources: common/comm_gemm_overlap/comm_gemm_overlap.cpp and
pytorch/csrc/extensions/comm_gemm_overlap.cpp of Transformer Engine 2.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory, distributed_c10d

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.enums import CommOverlapType
from prismscale.torch_versions import renamed

_all_gather = renamed(dist, "all_gather_single", "all_gather_into_tensor")
_reduce_scatter = renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")

Product = tuple[int, int, int, int]
"""Extents of a product: batch, M (tokens), N (of the weight), K."""
Run = Callable[[Product], None]
"""Function that launches a part of a product."""


class CommOverlapHelper:
    """Holds the process group whose members map each other's memory."""

    def __init__(self, world_group: Any = None, intra_domain_group: Any = None) -> None:
        """Choose the group.

        Args:
            world_group: all ranks; it is used if there is no other group.
            intra_domain_group: ranks of one tensor-parallel group.
        """
        self.group = _nccl_group_of(intra_domain_group or world_group)


def _nccl_group_of(group: Any) -> Any:
    """Return the program's own NCCL group of the same ranks; ``group`` if there is none.

    ``group`` is made only for initialization, and may communicate between hosts.
    """
    ranks = dist.get_process_group_ranks(group)
    for known, (backend, _) in distributed_c10d._world.pg_map.items():
        if "nccl" in backend and dist.get_process_group_ranks(known) == ranks:
            return known
    return group


class CommOverlapCore:
    """A buffer that all members of a group see, and the communication through it."""

    is_p2p = False

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        *,
        atomic_gemm: bool = False,
        use_cublasmp: bool = False,
        **tuning: Any,
    ) -> None:
        """Allocate the buffer.

        Args:
            shape: rows and columns of the tensor that all members hold together.
            dtype: type of the tensor's elements; of 8 bits if the products are.
            tuning: streams, priorities and multiprocessors.

        Raises:
            NotImplementedError: the call asks for communication by cuBLASMp.
        """
        if use_cublasmp:
            raise NotImplementedError(
                "cuBLASMp communicates in kernels of its own, which the null device does not have: "
                "set with_cublasmp=False"
            )
        self._group, self._size = helper.group, tp_size
        self._rank = dist.get_rank(helper.group)
        self._whole = _symmetric_memory.empty(tuple(shape), dtype=dtype, device=_device())
        self._atomic = atomic_gemm
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def is_atomic_gemm(self) -> bool:
        """Return whether one product waits for the chunks of its input inside the kernel."""
        return self._atomic

    def with_cublasmp(self) -> bool:
        """Return whether cuBLASMp communicates (2.18 and newer)."""
        return False

    def is_p2p_overlap(self) -> bool:
        """Return whether chunks go around a ring."""
        return self.is_p2p

    def is_fp8_ubuf(self) -> bool:
        """Return whether elements have 8 bits."""
        return self._whole.element_size() == 1

    def set_buffer_params(self, quantizer: Any) -> None:
        """Do nothing: the scale of 8-bit elements is a value, and values do not exist here."""

    def copy_into_buffer(self, tensor: Tensor, local_chunk: bool = False) -> None:
        """Copy ``tensor`` into the whole buffer, or into this rank's chunk.

        Raises:
            RuntimeError: the size or the number of elements does not fit.
        """
        into = self._part(local_chunk)
        if tensor.element_size() != into.element_size() or tensor.numel() != into.numel():
            raise RuntimeError(
                "Tried to copy data into a Userbuffers buffer but they are not compatible: "
                f"{tensor.numel()} elements of {tensor.element_size()} bytes, "
                f"{into.numel()} of {into.element_size()} bytes"
            )
        launch(
            "transformer_engine::user_buffer_copy", memory("copy"), reads=[tensor], writes=[into]
        )

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> Tensor:
        """Return the whole buffer, or this rank's chunk.

        Raises:
            RuntimeError: ``shape`` has another number of elements.
        """
        part = self._part(local_chunk)
        if shape is not None and math.prod(shape) != part.numel():
            raise RuntimeError(
                f"Invalid shape for a Userbuffers buffer (requested shape={tuple(shape)}, "
                f"ubuf_size={part.numel()})"
            )
        return part.view(tuple(shape) if shape is not None else part.shape)

    def get_communication_stream(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams that send and receive."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        return self._streams

    def overlap(
        self,
        how: CommOverlapType,
        product: Product,
        run: Run,
        extra_output: Tensor | None,
        *,
        bulk: bool,
    ) -> None:
        """Run a product and a communication beside it; the current stream waits for both.

        Args:
            how: whether the product's input is gathered, or its output reduced.
            extra_output: receives a copy of the gathered data, or the reduced data.
            bulk: product and communication are independent of each other.
        """
        gathers = how == CommOverlapType.AG
        if bulk:
            work = self.gather() if gathers else self._reduce(self._whole)
            run(product)
            work.wait()
        elif gathers:
            self._gather_and_run(product, run)
        else:
            self._run_and_reduce(product, run, extra_output)
        if gathers and extra_output is not None and extra_output.numel():
            extra_output.copy_(self._whole.view(extra_output.shape))

    def gather(self) -> dist.Work:
        """Begin to gather the chunks of all members into the whole buffer."""
        work = _all_gather(
            self._whole, self._part(local_chunk=True), group=self._group, async_op=True
        )
        return _begun(work)

    def _reduce(self, part: Tensor) -> dist.Work:
        """Begin to reduce rows of the buffer; each member gets an equal share of them."""
        flat = part.reshape(-1)
        mine = flat[: flat.numel() // self._size]
        return _begun(_reduce_scatter(mine, flat, group=self._group, async_op=True))

    def _gather_and_run(self, product: Product, run: Run) -> None:
        """Gather the input while chunks of the product run; the last chunk waits for the gather."""
        work = self.gather()
        chunks = _split_tokens(product, self._size)
        for chunk in chunks[:-1]:
            run(chunk)
        work.wait()
        run(chunks[-1])

    def _run_and_reduce(self, product: Product, run: Run, output: Tensor | None) -> None:
        raise NotImplementedError

    def _part(self, local_chunk: bool) -> Tensor:
        if not local_chunk:
            return self._whole
        rows = self._whole.shape[0] // self._size
        return self._whole[self._rank * rows : (self._rank + 1) * rows]


class CommOverlapBase(CommOverlapCore):
    """Communication by one kernel, of the whole buffer or of each finished chunk of a product."""

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        num_splits: int = 3,
        **how: Any,
    ) -> None:
        """Allocate the buffer; ``how`` is passed to :class:`CommOverlapCore`."""
        super().__init__(buffer_shape, buffer_dtype, helper, tp_size, **how)
        self._splits = num_splits

    def _run_and_reduce(self, product: Product, run: Run, output: Tensor | None) -> None:
        """Run one chunk of the weight's columns after another, and reduce each chunk's output."""
        batch, m, n, k = product
        pieces = self._whole.reshape(-1).chunk(self._splits)
        works = []
        for piece in pieces:
            run((batch, m, max(n // self._splits, 1), k))
            works.append(self._reduce(piece))
        for work in works:
            work.wait()


class CommOverlapP2PBase(CommOverlapCore):
    """Communication in chunks that go around a ring of members."""

    is_p2p = True

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        comm_type: CommOverlapType,
        **how: Any,
    ) -> None:
        """Allocate the buffers; ``how`` is passed to :class:`CommOverlapCore`."""
        super().__init__(buffer_shape, buffer_dtype, helper, tp_size, **how)
        self._received: Tensor | None = None
        if comm_type == CommOverlapType.RS:
            rows = buffer_shape[0] // tp_size * (tp_size - 1)
            self._received = _symmetric_memory.empty(
                (rows, buffer_shape[1]), dtype=buffer_dtype, device=_device()
            )

    def _run_and_reduce(self, product: Product, run: Run, output: Tensor | None) -> None:
        """Send each member's rows to it when they are computed, and sum them up in the end."""
        chunks = _split_tokens(product, self._size)
        works = []
        for chunk, rows in zip(chunks[:-1], self._whole.chunk(self._size), strict=False):
            run(chunk)
            works.append(self._reduce(rows))
        run(chunks[-1])
        for work in works:
            work.wait()
        launch(
            "transformer_engine::reduce_user_buffers",
            memory("pointwise"),
            reads=[self._received, self._part(local_chunk=True)],
            writes=[output],
        )


class CommOverlap(CommOverlapBase):
    """:class:`CommOverlapBase` under the name that the library's Python code uses."""


class CommOverlapP2P(CommOverlapP2PBase):
    """:class:`CommOverlapP2PBase` under the name that the library's Python code uses."""


def bulk_overlap_ag_with_external_gemm(
    allgather_communicator: CommOverlapCore,
    send_stream: torch.cuda.Stream,
    recv_stream: torch.cuda.Stream,
) -> None:
    """Gather on the streams of a running product; later work on the current stream waits for it."""
    with torch.cuda.stream(send_stream):
        work = allgather_communicator.gather()
    work.wait()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _split_tokens(product: Product, parts: int) -> list[Product]:
    batch, m, n, k = product
    return [(batch, max(m // parts, 1), n, k)] * parts


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is no member of the group of its user buffers")
    return work


FUNCTIONS = {
    known.__name__: known
    for known in (
        CommOverlapCore,
        CommOverlapBase,
        CommOverlapP2PBase,
        CommOverlap,
        CommOverlapP2P,
        CommOverlapHelper,
        bulk_overlap_ag_with_external_gemm,
    )
}
