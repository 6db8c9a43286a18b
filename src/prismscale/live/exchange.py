"""Contributions of live ranks to each other, through shared memory.

There is one file per (writer, reader, communication). The reader removes it after reading, so
nothing is overwritten too early and nothing stays behind. The coordinator releases a communication
only when all live members have arrived, and each writes its files before it arrives. So a reader
waits for a file only if the graph does not have the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from prismscale.emulation.hook import Collective
from prismscale.errors import StorageError, StuckError
from prismscale.files import await_file
from prismscale.graph.node import CollectiveOp
from prismscale.live.trace_cursor import describe
from prismscale.payload.combine import rows_for
from prismscale.payload.tensor_bytes import tensor_bytes

POLL_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One live rank's view of the shared folder."""

    folder: Path
    rank: int
    live: frozenset[int]
    """All live ranks of the job."""
    patience_s: float = 600.0
    """How long to wait for a contribution that the coordinator does not announce: as long as
    NCCL's groups do. The writer may save a checkpoint before."""

    def peers(self, collective: Collective) -> list[int]:
        """Other live ranks that take part in ``collective`` (for send and recv: the peer)."""
        ranks = collective.group.ranks
        if collective.op.is_p2p:
            ranks = (ranks[collective.root],)
        elif len(ranks) > 4 * len(self.live):
            members = set(ranks)
            return sorted(r for r in self.live if r != self.rank and r in members)
        return [r for r in ranks if r in self.live and r != self.rank]

    def offer(self, instance: str, collective: Collective, readers: Sequence[int]) -> None:
        """Write this rank's inputs for each reader; for an all_to_all, the rows for that reader.

        ``instance`` names the communication alike on every rank.

        Raises:
            StorageError: shared memory is full.
        """
        for reader in readers:
            path = self._path(instance, self.rank, reader)
            part = path.with_suffix(".part")
            try:
                with part.open("wb") as file:
                    for tensor in self._given(collective, reader):
                        file.write(tensor_bytes(tensor))
                # A reader looks only for the final name. Nothing is synced as in files.py, because
                # this is memory.
                part.replace(path)
            except OSError as error:
                raise StorageError(
                    f"contribution of rank {self.rank} cannot be written to {self.folder}: "
                    f"{error.strerror}; live ranks that share groups need shared memory for the "
                    "tensors they exchange"
                ) from error

    def take(self, instance: str, writer: int, collective: Collective) -> list[torch.Tensor]:
        """Read and remove what ``writer`` contributed: its inputs, flat, one for each of ours.

        In every symmetric collective a peer's inputs have the sizes of ours. Otherwise they are
        returned as equal parts (scatter's root) or as one flat tensor (an all_to_all: the peer's
        rows for this rank).

        Raises:
            StuckError: the writer never comes to this communication.
        """
        path = self._path(instance, writer, self.rank)
        self._await(path, writer, collective)
        # torch wants a writable buffer.
        data = bytearray(path.read_bytes())
        path.unlink()
        like = collective.inputs or collective.outputs
        is_whole = sum(t.numel() * t.itemsize for t in like) == len(data)
        if is_whole and collective.op is not CollectiveOp.ALL_TO_ALL:
            return _apart(data, like)
        flat = torch.frombuffer(data, dtype=like[0].dtype) if data else like[0].new_empty(0)
        if collective.op is CollectiveOp.ALL_TO_ALL:
            return [flat]
        size = collective.group.size
        if collective.op == CollectiveOp.SCATTER and flat.numel() % size == 0:
            return list(flat.chunk(size))
        return [flat]

    @staticmethod
    def _given(collective: Collective, reader: int) -> Sequence[torch.Tensor]:
        if collective.op is CollectiveOp.ALL_TO_ALL:
            return [rows_for(collective, collective.group.ranks.index(reader))]
        return collective.inputs

    def _await(self, path: Path, writer: int, collective: Collective) -> None:
        if not await_file(path, self.patience_s, poll_s=POLL_S):
            raise StuckError(
                f"rank {self.rank} waits for live rank {writer}, which does not come to "
                f"{describe(collective)} within {self.patience_s:.0f} s; captured steps do not "
                "have this communication"
            )

    def _path(self, instance: str, writer: int, reader: int) -> Path:
        return self.folder / f"{instance}.{writer}.{reader}"


def _apart(data: bytearray, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat tensors of the sizes and element types of ``like``, which coalesced calls mix."""
    found, at = [], 0
    for tensor in like:
        count = tensor.numel()
        if count:
            found.append(torch.frombuffer(data, dtype=tensor.dtype, offset=at, count=count))
        else:
            found.append(tensor.new_empty(0))
        at += count * tensor.itemsize
    return found
