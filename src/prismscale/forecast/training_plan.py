"""Plans a training from what the run shows and what the user asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.cluster import Cluster
from prismscale.errors import UsageError
from prismscale.forecast.fleet import NO_FAILURES, Fleet
from prismscale.forecast.recording import Recording
from prismscale.forecast.training import TrainingPlan
from prismscale.sim.event_cost import EventCost

USUAL_FLEET = "llama3-405b"
"""Fleet whose failure rates are used where the user gives none."""
CHECKPOINT_S = 60.0
"""Time to write a checkpoint, where neither the program writes any nor the user says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """What the user says about the machines. None: as the run shows, or the usual value."""

    nodes: int | None = None
    failures: str | None = None
    """Name of a fleet, path of a TOML file, or ``none``."""
    mtbf_hours: float | None = None
    """Mean time between failures of one node, in place of a fleet."""
    checkpoint_s: float | None = None
    restart_s: float = 600.0
    replace_s: float = 0.0
    spares: int | None = None
    repair_hours: float = 24.0
    interval_s: float | None = None

    def __post_init__(self) -> None:
        if self.failures is not None and self.mtbf_hours is not None:
            raise UsageError("--failures and --mtbf-hours say the same thing; give one of them")


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """A plan, and notes on where its figures come from."""

    plan: TrainingPlan
    gpus: int
    """Number of devices that are paid for as long as the training lasts."""
    notes: tuple[str, ...]


def training_plan(recording: Recording, asked: Machines, steps: int) -> PlannedTraining:
    """Return the plan of a training of ``steps`` steps.

    Raises:
        UsageError: impossible figures, an unknown fleet, or failures of an unknown number of
            machines.
        FormatError: a damaged fleet file.
    """
    world_size, cluster = recording.samples.graph.world_size, recording.cluster
    per_node = cluster.devices_per_node if cluster else 1
    fleet = _fleet(asked, cluster)
    nodes = asked.nodes
    if nodes is None and fleet is not None and cluster is None and world_size > 1:
        raise UsageError(
            f"the import does not say on how many machines its {world_size} ranks ran, and each "
            "of them can fail: give their number with --nodes"
        )
    if nodes is None:
        nodes = -(-world_size // per_node) if cluster else 1
    saves = _saving(recording.events)
    checkpoint_s = asked.checkpoint_s
    if checkpoint_s is None:
        # A checkpoint that nothing waits for still has to be started.
        checkpoint_s = max(saves.extra_ns / 1e9, 1e-3) if saves else CHECKPOINT_S
    # Without failures or an interval, checkpoints come as often as the program writes them.
    is_planned = fleet is not None or asked.interval_s is not None
    left_out = saves if is_planned else None
    plan = TrainingPlan(
        steps=steps,
        extra_ns=sum(e.per_step_ns for e in recording.events if e is not left_out),
        nodes=nodes,
        fleet=fleet,
        checkpoint_s=checkpoint_s,
        restart_s=asked.restart_s,
        replace_s=asked.replace_s,
        spares=asked.spares,
        repair_hours=asked.repair_hours,
        interval_s=asked.interval_s,
    )
    notes = []
    if fleet is not None:
        notes.append(
            f"{nodes:,} nodes fail as those of {fleet.name} did: one every "
            f"{plan.job_mtbf_s / 3600:,.1f} hours, {fleet.replacing_share:.0%} of them replaced"
        )
    if saves is not None and is_planned and asked.checkpoint_s is None:
        notes.append(
            f"a checkpoint takes {checkpoint_s:,.3f} s, as the program's does, which comes every "
            f"{saves.facts.every} steps"
        )
    return PlannedTraining(plan=plan, gpus=world_size, notes=tuple(notes))


def _fleet(asked: Machines, cluster: Cluster | None) -> Fleet | None:
    if asked.mtbf_hours is not None:
        return Fleet.of_mtbf(asked.mtbf_hours)
    if asked.failures == NO_FAILURES:
        return None
    if asked.failures is not None:
        return Fleet.load(asked.failures)
    known = cluster is not None and not cluster.processor_communicates
    return Fleet.load(USUAL_FLEET) if known else None


def _saving(events: Sequence[EventCost]) -> EventCost | None:
    """Return the recurring event in which the program writes its checkpoints, or None."""
    saving = (e for e in events if e.facts.checkpoint_bytes and e.rate)
    return max(saving, key=lambda e: e.facts.checkpoint_bytes, default=None)
