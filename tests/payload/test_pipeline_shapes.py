"""What absent pipeline stages would have said about their shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.pipelining._utils import _DTensorMeta, _StageForwardMeta, _TensorMeta
from torch.distributed.tensor import Partial, Replicate, Shard

from prismscale.payload.pipeline_shapes import StageMetadata

PLAIN = _TensorMeta(
    shape=torch.Size([2, 8]), stride=(8, 1), dtype=torch.bfloat16, requires_grad=True
)
PLACED = _DTensorMeta(
    shape=torch.Size([2, 4]),
    stride=(4, 1),
    dtype=torch.float32,
    requires_grad=True,
    global_shape=torch.Size([2, 8]),
    global_stride=(8, 1),
    placements=(Shard(1), Replicate(), Partial("sum")),
    mesh_dim_names=("tp", "cp", "dp"),
    mesh_layout=_MeshLayout([_FlatLayout((2,), (1,)) for _ in range(3)]),
)


class Stage:
    """As much of a pipeline stage as is asked."""

    def __init__(self, metadata: StageMetadata, index: int) -> None:
        self._metadata = metadata
        self.stage_index = index
        self._stage_meta = _StageForwardMeta((PLAIN,))
        self._stage_meta = type("Meta", (), {"outputs": (PLAIN, PLACED)})()

    def _recv_meta(self, src_stage: int) -> Any:
        return self._metadata.expected(sys._getframe())


def test_shapes_that_the_first_stage_sent_reach_other_ranks(tmp_path: Path) -> None:
    """Placements and meshes included, through a file of plain JSON."""
    first, other = StageMetadata(), StageMetadata()
    with first.shared_in(tmp_path), other.shared_in(tmp_path):
        first.sent([_StageForwardMeta((PLAIN, PLACED))])
        assert Stage(other, 3)._recv_meta(2) == _StageForwardMeta((PLAIN, PLACED))


def test_gradients_have_the_shapes_of_the_stages_own_outputs() -> None:
    """And need no gradient themselves."""
    metas = Stage(StageMetadata(), 3)._recv_meta(4).backward_metas
    assert [meta.shape for meta in metas] == [PLAIN.shape, PLACED.shape]
    assert not any(meta.requires_grad for meta in metas)


def test_other_objects_are_nobodys_shapes(tmp_path: Path) -> None:
    """A program's own objects are neither kept nor answered."""
    metadata = StageMetadata()
    with metadata.shared_in(tmp_path):
        metadata.sent([{"a": 1}])
    assert list(tmp_path.iterdir()) == []
    assert metadata.expected(sys._getframe()) is None
