"""What absent pipeline stages would have said about their shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import _mesh_layout
from torch.distributed.pipelining import _utils
from torch.distributed.tensor import Partial, Replicate, Shard

from prismscale.payload.stages.pipeline_shapes import StageMetadata

HAS_CLASSES = hasattr(_utils, "_StageForwardMeta")
needs_classes = pytest.mark.skipif(not HAS_CLASSES, reason="torch 2.11 has no classes for shapes")


def mesh_layout() -> Any:
    """Three axes of one; until torch 2.12 one layout of tuples."""
    flat, kind = getattr(_mesh_layout, "_FlatLayout", None), _mesh_layout._MeshLayout
    return kind((1, 1, 1), (1, 1, 1)) if flat is None else kind([flat((1,), (1,))] * 3)


def plain() -> Any:
    """Shape of a tensor."""
    return _utils._TensorMeta(
        shape=torch.Size([2, 8]), stride=(8, 1), dtype=torch.bfloat16, requires_grad=True
    )


def placed() -> Any:
    """Shape of a DTensor."""
    return _utils._DTensorMeta(
        shape=torch.Size([2, 4]),
        stride=(4, 1),
        dtype=torch.float32,
        requires_grad=True,
        global_shape=torch.Size([2, 8]),
        global_stride=(8, 1),
        placements=(Shard(1), Replicate(), Partial("sum")),
        mesh_dim_names=("tp", "cp", "dp"),
        mesh_layout=mesh_layout(),
    )


class Stage:
    """As much of a pipeline stage as is asked."""

    def __init__(self, metadata: StageMetadata, index: int) -> None:
        self._metadata = metadata
        self.stage_index = index

    def _recv_meta(self, src_stage: int) -> Any:
        self._stage_meta = type("Meta", (), {"outputs": (plain(), placed())})()
        return self._metadata.expected(sys._getframe())

    def _shape_inference(self) -> Any:
        return self._metadata.expected(sys._getframe())


@needs_classes
def test_shapes_that_the_first_stage_sent_reach_other_ranks(tmp_path: Path) -> None:
    """Placements and meshes included, through a file of plain JSON."""
    first, other = StageMetadata(), StageMetadata()
    with first.shared_in(tmp_path), other.shared_in(tmp_path):
        sent = _utils._StageForwardMeta((plain(), placed()))
        first.sent([sent])
        assert Stage(other, 3)._recv_meta(2) == sent


@pytest.mark.skipif(HAS_CLASSES, reason="torch 2.11 alone sends meta tensors")
def test_meta_tensors_that_the_first_stage_sent_reach_other_ranks(tmp_path: Path) -> None:
    """As the classes of later versions do."""
    first, other = StageMetadata(), StageMetadata()
    with first.shared_in(tmp_path), other.shared_in(tmp_path):
        first.sent([(torch.empty(2, 8, dtype=torch.bfloat16, device="meta").t(),)])
        (told,) = Stage(other, 3)._shape_inference()
    assert told.is_meta
    assert (told.shape, told.stride(), told.dtype) == ((8, 2), (1, 8), torch.bfloat16)


@needs_classes
def test_gradients_have_the_shapes_of_the_stages_own_outputs() -> None:
    """And need no gradient themselves."""
    metas = Stage(StageMetadata(), 3)._recv_meta(4).backward_metas
    assert [meta.shape for meta in metas] == [plain().shape, placed().shape]
    assert not any(meta.requires_grad for meta in metas)


def test_other_objects_are_nobodys_shapes(tmp_path: Path) -> None:
    """A program's own objects are neither kept nor answered."""
    metadata = StageMetadata()
    with metadata.shared_in(tmp_path):
        metadata.sent([{"a": 1}])
        metadata.sent([(torch.ones(2), 3)])
    assert list(tmp_path.iterdir()) == []
    assert metadata.expected(sys._getframe()) is None


def test_a_first_stage_that_failed_is_waited_for_no_longer(tmp_path: Path) -> None:
    """Its file will not come: the receiver is told nothing at once."""
    other = StageMetadata()
    with other.shared_in(tmp_path, while_true=lambda: False):
        assert Stage(other, 3)._recv_meta(2) is None
