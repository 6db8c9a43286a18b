"""Shapes that pipeline stages without static shapes send each other before the first step.

Each stage receives, as a pickled object, the shapes that the stage before it sends forward and
those that the stage after it sends back. The answer in place of an absent stage comes from:

- *backward*: the receiver's own outputs, because a gradient has the shape of its tensor;
- *forward*: what a stage of this rank, or of the rank with the first stage, sent: see
  :mod:`prismscale.payload.stages.first_stage`.

torch 2.11 sends forward shapes only, as a plain tuple of meta tensors; later versions have classes
for them. Values recorded from real sending stages (:mod:`prismscale.payload.recorded`) have
priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import _mesh_layout
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.tensor import Partial, Replicate, Shard

from prismscale.emulation.call_site import callers
from prismscale.payload.stages.first_stage import FirstStageNote

FILE = "pipeline-forward.json"


class StageMetadata:
    """The stage metadata of one emulated rank."""

    def __init__(self) -> None:
        self._note = FirstStageNote(FILE)
        self._forward: Any = None

    @contextmanager
    def shared_in(
        self, folder: Path, *, while_true: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Exchange shapes with other ranks through ``folder``: see :class:`FirstStageNote`."""
        try:
            with self._note.shared_in(folder, while_true=while_true):
                yield
        finally:
            self._forward = None

    def sent(self, objects: Sequence[Any]) -> None:
        """Note objects that this rank sends to a peer, if they are the shapes of a stage."""
        metas = _forward_metas(objects[0]) if len(objects) == 1 else None
        if metas is None:
            return
        self._forward = objects[0]
        self._note.leave(_encode(metas))

    def expected(self, frame: FrameType | None) -> Any:
        """Return the object that the receiving stage would be sent; None if unknown or no stage."""
        for caller in callers(frame):
            if caller.f_code.co_name == "_recv_meta":
                stage, source = caller.f_locals["self"], caller.f_locals["src_stage"]
                return self._forward_of() if source < stage.stage_index else _backward_of(stage)
            if caller.f_code.co_name == "_shape_inference":  # torch 2.11
                return self._forward_of()
        return None

    def _forward_of(self) -> Any:
        if self._forward is None and (rows := self._note.wait()) is not None:
            self._forward = _decode(rows)
        return self._forward


def _kinds() -> Any:
    """Import lazily, for pipelines only: the import makes a tensor in the program's own memory."""
    return import_module("torch.distributed.pipelining._utils")


def _has_classes() -> bool:
    return hasattr(_kinds(), "_StageForwardMeta")


def _forward_metas(told: Any) -> Sequence[Any] | None:
    """Return the metadata of each tensor sent forward; None for the program's own object."""
    if type(told).__name__ == "_StageForwardMeta":
        metas: Sequence[Any] = told.forward_metas
        return metas
    if not isinstance(told, tuple) or not all(type(item) is torch.Tensor for item in told):
        return None
    return told if all(item.is_meta for item in told) and not _has_classes() else None


def _backward_of(stage: Any) -> Any:
    """Return metadata of the gradients of a stage's outputs, with the outputs' placements."""
    metas = [
        replace(meta, requires_grad=False) if meta.requires_grad else None
        for meta in stage._stage_meta.outputs
    ]
    return _kinds()._StageBackwardMeta(tuple(metas))


def _encode(metas: Sequence[Any]) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in _facts(meta).items()} for meta in metas]


def _facts(meta: Any) -> dict[str, Any]:
    if isinstance(meta, torch.Tensor):
        return {"shape": meta.shape, "stride": meta.stride(), "dtype": meta.dtype}
    return {spec.name: getattr(meta, spec.name) for spec in fields(meta)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, _MeshLayout):
        return [_plain((axis.shape, axis.stride)) for axis in _axes_of(value)]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Shard):
        return {"shard": value.dim}
    if isinstance(value, Partial):
        return {"partial": value.reduce_op}
    return "replicate" if isinstance(value, Replicate) else value


def _axes_of(layout: Any) -> Sequence[Any]:
    """Return a mesh's layouts: one for each axis; until torch 2.12, one of nested tuples."""
    return layout.axes if hasattr(layout, "axes") else (layout,)


def _layout_of(axes: Sequence[Any]) -> Any:
    kind: Any = _MeshLayout
    flat = getattr(_mesh_layout, "_FlatLayout", None)
    return kind(*axes[0]) if flat is None else kind([flat(*axis) for axis in axes])


def _decode(rows: Sequence[Mapping[str, Any]]) -> Any:
    metas = tuple(_meta_of(row) for row in rows)
    return _kinds()._StageForwardMeta(metas) if _has_classes() else metas


def _meta_of(row: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {name: _tuple(value) for name, value in row.items()}
    values["shape"], values["dtype"] = torch.Size(row["shape"]), getattr(torch, row["dtype"])
    if not _has_classes():
        return torch.empty_strided(
            values["shape"], values["stride"], dtype=values["dtype"], device="meta"
        )
    if "placements" not in row:
        return _kinds()._TensorMeta(**values)
    values["global_shape"] = torch.Size(row["global_shape"])
    values["placements"] = tuple(_placement_of(value) for value in row["placements"])
    values["mesh_layout"] = _layout_of(_tuple(row["mesh_layout"]))
    return _kinds()._DTensorMeta(**values)


def _placement_of(value: Any) -> Any:
    if value == "replicate":
        return Replicate()
    return Shard(value["shard"]) if "shard" in value else Partial(value["partial"])


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list) else value
