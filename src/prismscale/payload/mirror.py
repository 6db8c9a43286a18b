"""Payload sources: the values that absent peers contribute to a communication's outputs.

Every fill writes below autograd, as a real backend does: no graph, no version bump, inference
tensors allowed. Meta tensors have no values and are left alone. No output is left undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp
from prismscale.payload import objects
from prismscale.payload.arithmetic import BLOCK_NUMEL, chunk, in_float32, reduce_copies
from prismscale.payload.combine import Contributions, fit, write_parts
from prismscale.payload.megatron_shapes import MegatronShapes
from prismscale.payload.pipeline_vote import PipelineVote

_RECEIVED_STD = 0.02
"""Standard deviation of what an absent peer sends: small and finite, like an initialised weight or
activation."""
_SEED = 0x5EED

_IMPLAUSIBLE = 1 << 32
FROM_ONE = frozenset({CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.RECV})


def absent_members(collective: Collective, here: Container[int]) -> list[int]:
    """Return the group ranks of other members, not in ``here``, from which this rank receives."""
    group, op = collective.group, collective.op
    if op in (CollectiveOp.SEND, CollectiveOp.BARRIER) or not collective.outputs:
        return []
    if op is CollectiveOp.REDUCE and collective.root != group.group_rank:
        return []
    members = [collective.root] if op in FROM_ONE else range(group.size)
    return [m for m in members if m != group.group_rank and m not in here]


class PayloadSource(Protocol):
    """Gives the outputs of a communication the values that absent peers would contribute."""

    def fill(self, collective: Collective) -> None:
        """Define every output of ``collective``; only this rank of its members is here."""
        ...

    def fill_among(self, collective: Collective, parts: Contributions) -> None:
        """Define every output where more members are here.

        ``parts`` is what each of them, this rank included, contributes to this rank's outputs.
        """
        ...


class PayloadRule(Protocol):
    """A payload source that answers some communications only."""

    def offer(self, collective: Collective) -> bool:
        """Define the outputs and answer True, or answer False: later rules define them.

        A rule that answers False may set values that later rules keep where they know no better.
        """
        ...


class CompositePayload:
    """Asks rules in order; a communication that no rule answers goes to ``otherwise``."""

    def __init__(self, rules: Sequence[PayloadRule], otherwise: PayloadSource) -> None:
        self._rules = tuple(rules)
        self._otherwise = otherwise

    def fill(self, collective: Collective) -> None:
        """Define every output."""
        if not any(rule.offer(collective) for rule in self._rules):
            self._otherwise.fill(collective)

    def fill_among(self, collective: Collective, parts: Contributions) -> None:
        """Ask ``otherwise``: rules apply only to a rank that is alone."""
        self._otherwise.fill_among(collective, parts)


class MirrorPayload:
    """Every peer contributes what this rank does.

    ============== =======================================================================
    all_reduce     SUM ×K, PRODUCT ^K, BXOR 0 for even K, all others: the tensor itself
    reduce         the same on the root, nothing elsewhere
    all_gather     this rank's input in each place
    reduce_scatter this rank's own chunk, reduced as above
    all_to_all     the rows for this rank, from each member (repeated or cut to its split)
    gather         this rank's input in each place, on the root
    broadcast      absent root: the tensor itself, as if the root held the same; values that
                   only uninitialised memory holds (not finite, integers beyond 32 bits) become 0
    scatter, recv  absent peer: small Gaussian values for floats, zero for everything else
    ============== =======================================================================

    Pickled objects from absent peers are answered by :mod:`prismscale.payload.objects`.
    """

    def __init__(self) -> None:
        generator = torch.Generator("cpu").manual_seed(_SEED)
        # Allocated up front, so that no receive shows in the program's own memory figures.
        # The program may have set another default device or dtype.
        block = torch.randn(BLOCK_NUMEL, generator=generator, device="cpu", dtype=torch.float32)
        self._block = block.mul_(_RECEIVED_STD)
        self._vote, self._shapes = PipelineVote(), MegatronShapes()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._fills: dict[CollectiveOp, Callable[[Collective], None]] = {
            CollectiveOp.ALL_REDUCE: _all_reduce,
            CollectiveOp.REDUCE: _reduce,
            CollectiveOp.ALL_GATHER: _all_gather,
            CollectiveOp.REDUCE_SCATTER: _reduce_scatter,
            CollectiveOp.ALL_TO_ALL: _all_to_all,
            CollectiveOp.GATHER: _gather,
            CollectiveOp.BROADCAST: _broadcast,
            CollectiveOp.SCATTER: self._scatter,
            CollectiveOp.SEND: _nothing,
            CollectiveOp.RECV: self._recv,
        }

    def fill(self, collective: Collective) -> None:
        """Define every output of ``collective``."""
        fill = self._fills.get(collective.op)
        outputs = collective.outputs
        if fill is None or not (outputs or collective.inputs):
            return
        if (outputs or collective.inputs)[0].is_meta or self._is_of_a_pipeline(collective):
            return
        if collective.op in FROM_ONE and self._answers_object(collective):
            return
        with torch._C._AutoDispatchBelowADInplaceOrView():
            fill(collective)

    def fill_among(self, collective: Collective, parts: Contributions) -> None:
        """Let absent members contribute what one of the members here does."""
        write_parts(collective, parts)

    def _is_of_a_pipeline(self, collective: Collective) -> bool:
        """Answer a message by which pipeline stages agree; return False for any other."""
        if not collective.op.is_p2p:
            return False
        rules = (self._vote, self._shapes, objects.MIRROR.deepspeed_stages)
        return any(rule.offer(collective) for rule in rules)

    def _answers_object(self, collective: Collective) -> bool:
        is_absent = collective.root != collective.group.group_rank
        return is_absent and objects.MIRROR.offer(collective.outputs)

    def _scatter(self, collective: Collective) -> None:
        if collective.inputs:
            collective.outputs[0].copy_(collective.inputs[collective.group.group_rank])
        else:
            self._recv(collective)

    def _recv(self, collective: Collective) -> None:
        for tensor in collective.outputs:
            self._receive(tensor)

    def _receive(self, tensor: torch.Tensor) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.device.type != "cpu":
            self._receive_on_device(tensor)
        elif not tensor.is_contiguous():
            room = torch.empty(tensor.shape, device="cpu", dtype=torch.float32)
            tensor.copy_(self._tiled(room))
        else:
            self._tiled(tensor)

    def _tiled(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.view(-1)
        n_whole = flat.numel() // BLOCK_NUMEL
        whole = flat[: n_whole * BLOCK_NUMEL].view(n_whole, BLOCK_NUMEL)
        whole.copy_(self._block)
        rest = flat[n_whole * BLOCK_NUMEL :]
        rest.copy_(self._block[: rest.numel()])
        return tensor

    def _receive_on_device(self, tensor: torch.Tensor) -> None:
        # Drawn in place: a cached block would show in the device's memory figures. A generator
        # of our own leaves the program's random numbers unchanged.
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(_SEED)
            self._generators[tensor.device] = generator
        if tensor.element_size() == 1:
            tensor.zero_()
        else:
            tensor.normal_(0.0, _RECEIVED_STD, generator=generator)


def _nothing(collective: Collective) -> None:
    """Do nothing: a send has no outputs."""


def _all_reduce(collective: Collective) -> None:
    for tensor in collective.outputs:
        reduce_copies(tensor, collective.reduce_op, collective.group.size)


def _reduce(collective: Collective) -> None:
    if collective.root == collective.group.group_rank:
        _all_reduce(collective)


def _all_gather(collective: Collective) -> None:
    inputs, outputs = collective.inputs, collective.outputs
    if len(inputs) == len(outputs):
        for source, output in zip(inputs, outputs, strict=True):
            _repeat(source, output, collective.group.size)
        return
    size = collective.group.size
    for k, source in enumerate(inputs):
        for output in outputs[k * size : (k + 1) * size]:
            fit(source, output)


def _reduce_scatter(collective: Collective) -> None:
    inputs, outputs = collective.inputs, collective.outputs
    size, rank = collective.group.size, collective.group.group_rank
    is_flat = len(inputs) == len(outputs)
    for k, output in enumerate(outputs):
        own = chunk(inputs[k], rank, output) if is_flat else inputs[k * size + rank]
        if own.data_ptr() != output.data_ptr():
            output.copy_(own)
        reduce_copies(output, collective.reduce_op, size)


def _all_to_all(collective: Collective) -> None:
    inputs, outputs = collective.inputs, collective.outputs
    size, rank = collective.group.size, collective.group.group_rank
    if len(outputs) > 1 or (size == 1 and not collective.output_splits):
        for output in outputs:
            fit(inputs[rank], output)
        return
    rows, received = inputs[0], outputs[0]
    splits = collective.input_splits or (rows.shape[0] // size,) * size
    start = sum(splits[:rank])
    own = rows[start : start + splits[rank]]
    wanted = collective.output_splits
    if not wanted or all(n == own.shape[0] for n in wanted):
        _repeat(own, received, size)
    else:
        _repeat_uneven(own, received, wanted)


def _gather(collective: Collective) -> None:
    for output in collective.outputs:
        fit(collective.inputs[0], output)


def _broadcast(collective: Collective) -> None:
    if collective.root == collective.group.group_rank:
        return
    for tensor in collective.outputs:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            if tensor.element_size() == 8 and tensor.dtype.is_signed:
                tensor.masked_fill_((tensor >= _IMPLAUSIBLE) | (tensor <= -_IMPLAUSIBLE), 0)
        elif tensor.element_size() == 1:
            in_float32(tensor, lambda part: part.nan_to_num_(0.0, 0.0, 0.0))
        else:
            tensor.nan_to_num_(0.0, 0.0, 0.0)


def _repeat(source: torch.Tensor, output: torch.Tensor, size: int) -> None:
    """Fill ``output`` with ``size`` copies of ``source`` (concatenated or stacked)."""
    shape = (size, *source.shape)
    if not output.is_contiguous():
        output.copy_(source.expand(shape).reshape(output.shape))
        return
    parts = output.view(shape)
    offset = source.data_ptr() - output.data_ptr()
    if 0 <= offset < output.nbytes and source.nbytes:
        # In place, as FSDP gathers: the input is its own slot of the output.
        slot = offset // source.nbytes
        parts[:slot].copy_(source)
        parts[slot + 1 :].copy_(source)
    else:
        parts.copy_(source)


def _repeat_uneven(own: torch.Tensor, output: torch.Tensor, splits: Sequence[int]) -> None:
    """Fill member k's ``splits[k]`` rows of ``output`` with the rows of ``own``, in a cycle."""
    if own.shape[0] == 0:
        output.zero_()
        return
    counts = torch.tensor(splits, device=output.device)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    row = torch.arange(output.shape[0], device=output.device).sub_(starts).remainder_(own.shape[0])
    output.copy_(own.index_select(0, row))
