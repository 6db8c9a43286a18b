"""What stages of DeepSpeed's pipeline are told by a stage that is not there."""

from __future__ import annotations

from pathlib import Path

import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.payload.stages.deepspeed_stages import DeepSpeedStages

FLOAT, DIMENSIONS = 5, (2, 128, 64)
NUMBERS = [0, FLOAT, len(DIMENSIONS), *DIMENSIONS]


class Stage:
    """Sends and receives as DeepSpeed's engine does, from functions of these names."""

    def __init__(self, rank: int, rule: DeepSpeedStages) -> None:
        self._rule = rule
        self._group = GroupHandle(
            group_index=0, ranks=(0, 1, 2, 3), group_rank=rank, name="default_pg", backend="nccl"
        )

    def _send_tensor_meta(self, numbers: list[int]) -> bool:
        meta_buf_list = list(numbers)
        buffer = torch.full((16,), -7, dtype=torch.int32)
        buffer[: len(meta_buf_list)] = torch.tensor(meta_buf_list, dtype=torch.int32)
        return self.message(CollectiveOp.SEND, buffer)

    def _recv_tensor_meta(self) -> torch.Tensor | None:
        buffer = torch.full((16,), -7, dtype=torch.int32)
        return buffer if self.message(CollectiveOp.RECV, buffer) else None

    def message(self, op: CollectiveOp, buffer: torch.Tensor, frames: int = 40) -> bool:
        """Whether the rule answered. ``frames``: of wrappers and the process group, on the way."""
        if frames:
            return self.message(op, buffer, frames - 1)
        sent = (buffer,) if op is CollectiveOp.SEND else ()
        received = () if sent else (buffer,)
        return self._rule.offer(
            Collective(op=op, group=self._group, inputs=sent, outputs=received, n_bytes=64, root=1)
        )


def test_a_stage_is_told_what_the_first_one_sends(tmp_path: Path) -> None:
    """The numbers alone: what else the tensor holds was never set."""
    first, last = DeepSpeedStages(), DeepSpeedStages()
    with first.shared_in(tmp_path), last.shared_in(tmp_path):
        assert not Stage(0, first)._send_tensor_meta(NUMBERS)
        told = Stage(3, last)._recv_tensor_meta()
    assert told is not None
    assert told.tolist() == NUMBERS + [0] * (16 - len(NUMBERS))


def test_other_messages_are_left_alone(tmp_path: Path) -> None:
    """Of integers too; and where no folder is shared, nothing is known."""
    rule = DeepSpeedStages()
    assert Stage(3, rule)._recv_tensor_meta() is None
    with rule.shared_in(tmp_path):
        stage = Stage(0, rule)
        stage._send_tensor_meta(NUMBERS)
        assert not stage.message(CollectiveOp.RECV, torch.zeros(16, dtype=torch.int32))
