"""Writes event files of TensorBoard, with tensorboard's own record writer and messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from prismscale.errors import UsageError
from prismscale.files import atomic_write

FILE_VERSION = "brain.Event:2"
"""Version in the first event of every file."""
FILE_NAME = "events.out.tfevents.prismscale"
"""TensorBoard reads files whose names contain ``tfevents``. Writing again replaces the file."""


def write_scalars(
    folder: Path, steps: Sequence[Mapping[str, float]], *, step_s: Sequence[float]
) -> Path:
    """Write the scalars of each step, from step 1.

    Args:
        folder: where to write; TensorBoard shows it as a run of its own.
        steps: the scalars of each step, value by tag.
        step_s: how long each step lasts; places it on TensorBoard's axis of time.

    Returns:
        The file.

    Raises:
        UsageError: tensorboard is not installed.
        StorageError: the file cannot be written; nothing is left half-written.
    """
    writer, events = _tensorboard()
    path, wall_time = folder / FILE_NAME, time.time()
    with atomic_write(path) as file:
        records = writer.RecordWriter(file)
        first = events.Event(wall_time=wall_time, file_version=FILE_VERSION)
        records.write(first.SerializeToString())
        for number, (scalars, seconds) in enumerate(zip(steps, step_s, strict=True), start=1):
            wall_time += seconds
            event = events.Event(wall_time=wall_time, step=number)
            for tag, value in scalars.items():
                event.summary.value.add(tag=tag, simple_value=value)
            records.write(event.SerializeToString())
        records.flush()
    return path


def _tensorboard() -> tuple[Any, ModuleType]:
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer import record_writer
    except ImportError as error:
        raise UsageError(
            "export tensorboard needs tensorboard: pip install 'prismscale[tensorboard]'"
        ) from error
    return record_writer, event_pb2
