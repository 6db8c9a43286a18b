"""Pipeline parallelism: layers split into stages, run by a schedule of microbatches."""

from __future__ import annotations

import torch
from config import TrainConfig
from parallel import Axes, LossFn, build_model
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)


def split_layers(layers: int, stages: int) -> list[range]:
    """Consecutive layers of each stage.

    What does not divide goes one layer each to the stages after the first: the first has the
    embedding, and the last, which has the head, is the last to get one.
    """
    base, extra = divmod(layers, stages)
    counts = [base + (1 <= stage <= extra) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


class Pipeline:
    """This rank's stages and the schedule that drives them.

    With several stages on a rank (interleaved), rank r of the pp axis has stages r, r + pp, …
    """

    def __init__(
        self, config: TrainConfig, mesh: Axes, device: torch.device, loss_fn: LossFn
    ) -> None:
        layout = config.layout
        layers = split_layers(config.model.layers, layout.stages)
        stages = [
            _build_stage(config, mesh, device, stage, layers[stage])
            for stage in range(mesh["pp"].get_local_rank(), layout.stages, layout.pp)
        ]
        self.parts = [stage.submod for stage in stages]
        self._is_first = stages[0].is_first
        self._is_last = stages[-1].is_last
        self._schedule = _build_schedule(layout.schedule, stages, config.microbatches, loss_fn)

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Run one step's samples; returns their mean loss on the last stage, else None."""
        losses: list[Tensor] = []
        self._schedule.step(
            *((tokens,) if self._is_first else ()),
            target=labels if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack(losses).mean() if self._is_last else None


def _build_schedule(
    name: str, stages: list[PipelineStage], microbatches: int, loss_fn: LossFn
) -> ScheduleInterleaved1F1B | Schedule1F1B | ScheduleGPipe:
    if name == "interleaved":
        return ScheduleInterleaved1F1B([*stages], microbatches, loss_fn)
    if name == "gpipe":
        return ScheduleGPipe(stages[0], microbatches, loss_fn)
    return Schedule1F1B(stages[0], microbatches, loss_fn)


def _build_stage(
    config: TrainConfig, mesh: Axes, device: torch.device, stage: int, layers: range
) -> PipelineStage:
    """One stage, told the shapes of its input and output.

    Left to itself, torch would find them by running the pipeline once and pickling them from
    stage to stage.
    """
    model, layout, rows = config.model, config.layout, config.batch_size
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    length = config.seq_len // layout.tp if layout.sequence_parallel else config.seq_len
    with torch.device("meta"):
        tokens = torch.empty(rows, config.seq_len, dtype=torch.int64)
        hidden = torch.empty(rows, length, model.hidden, dtype=dtype, requires_grad=True)
        logits = torch.empty(
            rows, config.seq_len, model.vocab // layout.tp, dtype=dtype, requires_grad=True
        )
    return PipelineStage(
        build_model(config, mesh, device, layers),
        stage,
        layout.stages,
        device,
        input_args=tokens if stage == 0 else hidden,
        output_args=logits if stage == layout.stages - 1 else hidden,
        group=mesh["pp"].get_group(),
    )
