"""Other layouts of a job that was captured: its stages' durations, laid out anew.

The model is a line from the first stage to the last. Each captured stage (each model chunk, where
they interleave) covers an equal part of it and spends its measured time there, evenly; a chunk of
another layout spends what lies under its own part. With the captured degrees every stage keeps its
own figures. What is assumed beyond that:

- half of a backward pass is the gradient of the weights (zero-bubble schedules put it elsewhere):
  of a matrix product, both halves are matrix products of the same size;
- tensor parallelism divides computation evenly;
- peak memory is state and held activations, told apart by how many microbatches each stage holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy

from prismscale.cost.collective import CollectiveModel
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.samples import StepSamples
from prismscale.errors import UsageError
from prismscale.forecast.draws.variation import Variation
from prismscale.forecast.layouts.explore_job import fullest_stage_bytes
from prismscale.forecast.layouts.layout import Layout, Move, PassCosts, build_layout
from prismscale.forecast.layouts.passes import STEP, Degrees, StagePasses, read_passes
from prismscale.sim.retime import retime

WEIGHT_SHARE = 0.5
"""Of a backward pass."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What peaks of the captured stages say, in bytes of one captured stage."""

    state: float
    activations: float
    """Of one microbatch."""
    first: float
    """Further state of the first stage."""
    last: float


@dataclass(frozen=True)
class CapturedJob:
    """A captured pipeline (an :class:`~prismscale.forecast.layouts.explore.OpenJob`)."""

    degrees: Degrees
    stages: Sequence[StagePasses]
    variation: Variation

    @classmethod
    def of(cls, samples: StepSamples, communication: Variation) -> CapturedJob:
        """Read a recording; how unsteady communication is cannot be read off a capture.

        Raises:
            UsageError: see :func:`~prismscale.forecast.layouts.passes.read_passes`.
        """
        degrees, stages = read_passes(samples)
        return cls(degrees, stages, _variation(samples, stages, communication))

    @property
    def captured_layout(self) -> Layout:
        """The layout that the run itself had."""
        d = self.degrees
        held = self.stages[0].in_flight
        name = "gpipe" if held >= d.microbatches > d.pp else "1f1b"
        name = "interleaved" if d.chunks > 1 else name
        return self.layout(tp=d.tp, pp=d.pp, chunks=d.chunks, name=name)

    def layout(self, *, tp: int, pp: int, chunks: int, name: str) -> Layout:
        """The layout of these degrees, for the same batch.

        Raises:
            UsageError: ranks or batch that do not divide, or a tensor-parallel degree whose
            collectives are not known.
        """
        d = self.degrees
        world = d.tp * d.pp * d.dp
        if world % (tp * pp):
            raise UsageError(f"{world} ranks do not divide")
        if tp > d.tp == 1:
            raise UsageError("captured without tensor parallelism: its collectives are not known")
        dp = world // (tp * pp)
        if d.microbatches * d.dp % dp:
            raise UsageError(f"{d.microbatches * d.dp} microbatches do not divide by DP {dp}")
        microbatches = d.microbatches * d.dp // dp
        return Layout(tp=tp, pp=pp, dp=dp, microbatches=microbatches, schedule=name, chunks=chunks)

    def pass_costs(self, layout: Layout) -> list[PassCosts]:
        """Costs of every model chunk, in the order of the forward pass."""
        places = layout.pp * layout.chunks
        shares = [self._shares(p, places) for p in range(places)]
        by_stage = [
            np.sum([shares[c * layout.pp + s] for c in range(layout.chunks)], axis=0)
            for s in range(layout.pp)
        ]
        faster = self.degrees.tp / layout.tp
        return [
            self._costs(shares[p], by_stage[p % layout.pp], faster, self._boundary(p, places))
            for p in range(places)
        ]

    def peak_bytes(self, layout: Layout) -> int | None:
        """Memory of the fullest stage; None where the run did not track it."""
        if self._memory is None:
            return None
        of_one = self.degrees.pp * self.degrees.tp / (layout.pp * layout.tp)
        return fullest_stage_bytes(
            layout,
            state=self._memory.state * of_one,
            activations=self._memory.activations * of_one / layout.chunks,
            first=self._memory.first * self.degrees.tp / layout.tp,
            last=self._memory.last * self.degrees.tp / layout.tp,
        )

    @cached_property
    def _memory(self) -> StageMemory | None:
        peaks = [s.peak_bytes for s in self.stages]
        if any(p is None for p in peaks):
            return None
        # A stage holds a microbatch of each of its chunks, which are parts of one captured stage.
        held = np.array([s.in_flight / self.degrees.chunks for s in self.stages])
        inner = slice(1, -1) if len(peaks) >= 4 else slice(None)
        system = np.stack([np.ones_like(held), held], axis=1)
        found, _ = scipy.optimize.nnls(system[inner], np.array(peaks, dtype=np.float64)[inner])
        rest = np.maximum(np.array(peaks) - system @ found, 0.0)
        return StageMemory(
            state=float(found[0]),
            activations=float(found[1]),
            first=float(rest[0]),
            last=float(rest[-1]),
        )

    def _shares(self, place: int, places: int) -> np.ndarray:
        """``[S]``: how much of each captured stage lies in one of ``places`` equal parts."""
        d = self.degrees
        pieces = d.pp * d.chunks
        edge = np.arange(pieces + 1) / pieces
        low, high = place / places, (place + 1) / places
        inside = np.clip(np.minimum(edge[1:], high) - np.maximum(edge[:-1], low), 0.0, None)
        # Pieces follow each other through the stages, once for every chunk.
        return np.asarray(inside.reshape(d.chunks, d.pp).sum(axis=0) * d.pp)

    def _costs(
        self, share_S: np.ndarray, stage_S: np.ndarray, faster: float, boundary: int
    ) -> PassCosts:
        def total(phase: str, of_S: np.ndarray) -> float:
            return faster * sum(
                w * s.phase_ns[phase] for w, s in zip(of_S, self.stages, strict=True)
            )

        backward = total("backward", share_S)
        return PassCosts(
            forward_ns=round(total("forward", share_S)),
            input_gradient_ns=round(backward * (1 - WEIGHT_SHARE)),
            weight_gradient_ns=round(backward * WEIGHT_SHARE),
            optimizer_ns=round(total(STEP, stage_S)),
            forward_moves=self._pass_moves("forward", share_S),
            backward_moves=self._pass_moves("backward", share_S),
            boundary_bytes=boundary,
            step_moves=self._step_moves(stage_S, faster),
        )

    def _pass_moves(self, phase: str, share_S: np.ndarray) -> tuple[Move, ...]:
        """As many of each kind as the captured stages make in that part of the model."""
        counts: dict[Move, float] = {}
        for w, stage in zip(share_S, self.stages, strict=True):
            for move in stage.moves[phase]:
                counts[move] = counts.get(move, 0.0) + float(w)
        return tuple(move for move, count in counts.items() for _ in range(round(count)))

    def _step_moves(self, stage_S: np.ndarray, faster: float) -> tuple[Move, ...]:
        return tuple(
            move._replace(n_bytes=round(move.n_bytes * w * faster))
            for w, stage in zip(stage_S, self.stages, strict=True)
            if w > 0
            for move in stage.moves[STEP]
        )

    def _boundary(self, place: int, places: int) -> int:
        """What the captured stage at the end of this part of the model passes on."""
        stage = int(np.ceil((place + 1) / places * self.degrees.pp - 1e-9)) - 1
        return self.stages[min(max(stage, 0), len(self.stages) - 2)].boundary_bytes


def relaid_difference(job: CapturedJob, step_ns: int, model: CollectiveModel) -> float:
    """What the rules leave out: the captured layout by rule over the run's own step, minus 1, both
    without variation."""
    layout = job.captured_layout
    by_rule = build_layout(layout, job.pass_costs(layout))
    return retime(GraphDurations(graph=by_rule, model=model)).step_ns / step_ns - 1


def _variation(
    samples: StepSamples, stages: Sequence[StagePasses], communication: Variation
) -> Variation:
    if samples.n_steps < 2:
        return communication
    # A pass is cut at its collectives; slices that vary alone must vary more than the whole.
    slices = np.mean([max(1, len(s.moves["forward"])) for s in stages])
    weight = [sum(s.phase_ns.values()) for s in stages]
    cv = float(np.average([s.pass_cv for s in stages], weights=weight) * np.sqrt(slices))
    return Variation(
        compute_cv=cv,
        communication_cv=communication.communication_cv,
        stall_probability=communication.stall_probability,
        stall_factor=communication.stall_factor,
    )
