"""Records what one rank gives to its job's communications, and the results that it computes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from prismscale.emulation.hook import Collective
from prismscale.errors import StorageError
from prismscale.payload.recordings.blob_store import BlobStore
from prismscale.payload.recordings.selection import RecordSelection
from prismscale.payload.tensor_bytes import tensor_bytes

RESULT = -1
"""Stands in place of a rank for the result of a reduction."""
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("member", pa.int32()),
        ("at_ns", pa.int64()),
        ("tensors", pa.string()),
        ("splits", pa.list_(pa.int64())),
    ]
)


def blobs_of(folder: Path) -> Path:
    """Return the folder of a recording's bytes."""
    return folder / "blobs"


class RecordingWriter:
    """Records one rank. :meth:`close` lists what it recorded in ``index-<rank>.arrow``."""

    def __init__(
        self, folder: Path, rank: int, selections: Sequence[str], limit_bytes: int
    ) -> None:
        self._folder, self._rank = folder, rank
        self._selections = [RecordSelection.parse(text) for text in selections]
        self._blobs = BlobStore(blobs_of(folder), limit_bytes=limit_bytes)
        self._rows: list[dict[str, Any]] = []
        self.recorded = [0] * len(self._selections)
        """Number of communications by selection."""
        blobs_of(folder).mkdir(parents=True, exist_ok=True)

    def gave(self, name: str, collective: Collective, ranks: Sequence[int], step: int) -> None:
        """Keep what this rank gives to a communication that is selected.

        Raises:
            StorageError: there is no room, or it cannot be written.
        """
        covering = self._covering(collective, ranks, step)
        for i in covering:
            self.recorded[i] += 1
        if any(self._selections[i].keeps(collective.op, self._rank) for i in covering):
            self._write(name, self._rank, collective.inputs, collective.input_splits)

    def came_to(
        self,
        name: str,
        collective: Collective,
        ranks: Sequence[int],
        step: int,
        totals: Sequence[torch.Tensor],
    ) -> None:
        """Keep the result of a reduction that is selected. Raises as :meth:`gave`."""
        if self._covering(collective, ranks, step):
            self._write(name, RESULT, totals, ())

    def close(self) -> None:
        """Write the list of what was recorded, and the number of communications by selection."""
        path = self._folder / f"index-{self._rank}.arrow"
        try:
            table = pa.Table.from_pylist(self._rows, schema=SCHEMA).replace_schema_metadata(
                {"recorded": json.dumps(self.recorded)}
            )
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}") from error

    def _covering(self, collective: Collective, ranks: Sequence[int], step: int) -> list[int]:
        name = collective.group.name
        return [
            i
            for i, selection in enumerate(self._selections)
            if selection.covers(collective.op, name, ranks, step)
        ]

    def _write(
        self, name: str, member: int, tensors: Sequence[torch.Tensor], splits: Sequence[int]
    ) -> None:
        told = []
        for tensor in tensors:
            digest = self._blobs.put(tensor_bytes(tensor))
            told.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest])
        self._rows.append(
            {
                "name": name,
                "member": member,
                "at_ns": time.monotonic_ns(),
                "tensors": json.dumps(told),
                "splits": list(splits),
            }
        )
