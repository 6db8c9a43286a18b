"""A job whose layout is open, told by what one layer of its model costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from prismscale.errors import UsageError
from prismscale.forecast.draws.variation import Variation
from prismscale.forecast.layouts.layout import Layout, Move, PassCosts
from prismscale.forecast.layouts.schedules import in_flight, schedule
from prismscale.graph.node import CollectiveOp
from prismscale.typed_files import decode, read

TP_COLLECTIVES_A_LAYER = 2
"""One after attention, one after the feed-forward part (Shoeybi et al. 2019, section 3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """What one layer costs for one microbatch, on one device, without tensor parallelism."""

    forward_ns: float
    input_gradient_ns: float
    weight_gradient_ns: float
    embedding_ns: float = 0.0
    head_ns: float = 0.0
    """Output layer and loss: further forward time of the last stage."""
    optimizer_ns: float = 0.0
    """Of one layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """What one layer moves and holds, without tensor parallelism."""

    boundary: int
    """Activation of one microbatch between two layers."""
    gradients: int
    state: int
    """Weights, gradients and optimizer state."""
    activations: int
    """Held from forward to backward, for one microbatch."""
    ends_state: int = 0
    """State of the embedding on the first stage, and of the output layer on the last."""


@dataclass(frozen=True, kw_only=True)
class ExploreJob:
    """A job whose layout is open (an :class:`~prismscale.forecast.layouts.explore.OpenJob`)."""

    world_size: int
    layers: int
    global_batch: int
    micro_batch: int
    costs: LayerCosts
    bytes: LayerBytes
    variation: Variation = field(default_factory=Variation)

    def __post_init__(self) -> None:
        for name in ("world_size", "layers", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; at least 1 is needed")

    @classmethod
    def load(cls, path: Path) -> ExploreJob:
        """Read a job from TOML.

        Raises:
            UsageError: the file cannot be read. FormatError: it is damaged; names the key.
        """
        return decode(cls, read(path, "job file"), str(path))

    def with_communication_cv(self, cv: float) -> ExploreJob:
        """The same job with another variation of its communication."""
        return replace(self, variation=replace(self.variation, communication_cv=cv))

    def layout(self, *, tp: int, pp: int, chunks: int, name: str) -> Layout:
        """The layout of these degrees.

        Raises:
            UsageError: ranks, batch or layers that do not divide.
        """
        if self.world_size % (tp * pp):
            raise UsageError(f"{self.world_size} ranks do not divide")
        dp = self.world_size // (tp * pp)
        if self.global_batch % (dp * self.micro_batch):
            raise UsageError(
                f"batch {self.global_batch} does not divide by DP {dp} × {self.micro_batch}"
            )
        if self.layers % (pp * chunks):
            raise UsageError(f"{self.layers} layers do not divide by {pp * chunks} chunks")
        microbatches = self.global_batch // (dp * self.micro_batch)
        return Layout(tp=tp, pp=pp, dp=dp, microbatches=microbatches, schedule=name, chunks=chunks)

    def pass_costs(self, layout: Layout) -> list[PassCosts]:
        """Costs of every chunk: its layers, cut over the tensor-parallel group."""
        layers = self.layers / (layout.pp * layout.chunks)
        per_device = layers / layout.tp
        costs, sizes = self.costs, self.bytes
        collectives = max(1, round(TP_COLLECTIVES_A_LAYER * layers))
        moves = (Move(CollectiveOp.ALL_REDUCE, sizes.boundary),) * collectives
        gradients = round(sizes.gradients * per_device * layout.chunks)
        one = PassCosts(
            forward_ns=round(costs.forward_ns * per_device),
            input_gradient_ns=round(costs.input_gradient_ns * per_device),
            weight_gradient_ns=round(costs.weight_gradient_ns * per_device),
            optimizer_ns=round(costs.optimizer_ns * per_device * layout.chunks),
            first_stage_ns=round(costs.embedding_ns / layout.tp),
            last_stage_ns=round(costs.head_ns / layout.tp),
            forward_moves=moves,
            backward_moves=moves,
            boundary_bytes=sizes.boundary // layout.tp,
            step_moves=(Move(CollectiveOp.ALL_REDUCE, gradients, "dp"),),
        )
        return [one] * (layout.pp * layout.chunks)

    def peak_bytes(self, layout: Layout) -> int:
        """Memory of the fullest stage: state of its layers, and activations of what is in
        flight."""
        per_chunk = self.layers / (layout.pp * layout.chunks) / layout.tp
        return fullest_stage_bytes(
            layout,
            state=per_chunk * layout.chunks * self.bytes.state,
            activations=per_chunk * self.bytes.activations,
            first=self.bytes.ends_state / layout.tp,
            last=self.bytes.ends_state / layout.tp,
        )


def fullest_stage_bytes(
    layout: Layout, *, state: float, activations: float, first: float, last: float
) -> int:
    """Peak memory of the fullest stage.

    Args:
        state: weights, gradients and optimizer state of one stage.
        activations: what one microbatch leaves in one model chunk.
        first: further state of the first stage (embedding).
        last: further state of the last stage (output layer).
    """
    most = 0.0
    for stage in range(layout.pp):
        actions = schedule(
            layout.schedule,
            stage=stage,
            stages=layout.pp,
            microbatches=layout.microbatches,
            chunks=layout.chunks,
        )
        held = state + in_flight(actions) * activations
        held += first * (stage == 0)
        held += last * (stage == layout.pp - 1)
        most = max(most, held)
    return round(most)
