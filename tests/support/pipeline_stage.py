"""One stage of a two-stage pipeline without static shapes: RANK and payload FOLDER in argv."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from emulation import emulated
from prismscale.payload.mirror import CompositePayload, MirrorPayload
from prismscale.payload.recorded import RecordedPayload

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    payload = CompositePayload(
        [RecordedPayload(folder, is_captured_now=lambda rank: True)], MirrorPayload()
    )
    with emulated(rank, 2, payload=payload) as hook:
        stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).sum())
        arguments = {"target": torch.zeros(8, 8)} if rank else {}
        schedule.step(*(() if rank else (torch.randn(8, 8),)), **arguments)
        floats = [c for c in hook.collectives if (c.inputs or c.outputs)[0].is_floating_point()]
        print(json.dumps([c.op.spelling for c in floats]))
