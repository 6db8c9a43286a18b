"""``prismscale check-devices``: which of this machine's devices is slow, by the job's own ranks."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Annotated, Any

import typer
from rich.table import Table

from prismscale.api import load, perform
from prismscale.commands.verdicts.answer_options import as_json, emit
from prismscale.config import JobConfig
from prismscale.errors import UnmetError, UsageError
from prismscale.forecast.placement.paired_devices import DeviceSpeed, Turn, device_speeds, pairs
from prismscale.progress import TerminalReporter, terminal
from prismscale.report.units import duration
from prismscale.run_options import job_config, ranks_of, with_options_of

OTHERS = ("attach", "hang")
"""Options of ``run`` that a check has no use for."""


@with_options_of(job_config, without=OTHERS)
def check_devices(
    on: Annotated[
        str, typer.Option(help="Cores or GPUs, for example 0-7.", show_default="all")
    ] = "",
    tolerance: Annotated[
        float, typer.Option(help="Percent that a device may be above the others' median.")
    ] = 5.0,
    json: Annotated[str, typer.Option(help="Write what was found to a file.")] = "",
    **given: Any,
) -> None:
    """Run two of the job's ranks live on this machine's devices, two at a time, and name the slow.

    Each device has both ranks in turn; all others are replayed. Exit code 0: none is slow; 8: one
    is. Options are those of run.
    """
    # torch is imported by the commands that need it alone.
    from prismscale.measure.node_speed import local_devices

    if not 0 < tolerance < 1000:
        raise UsageError(f"--tolerance {tolerance:g}: allowed are percents above 0")
    config = _with_two_live(job_config(**given))
    devices = ranks_of(on, "--on") or local_devices(config.device)
    console = terminal()
    turns: list[Turn] = []
    for pair in pairs(devices):
        # Captures are those of the first turn.
        fresh = config.fresh and not turns
        turn = dataclasses.replace(config, live_on=pair, fresh=fresh)
        perform(turn, reporter=TerminalReporter(console))
        turns += _seen(turn)
    found = device_speeds(turns, tolerance / 100)
    _print(found)
    emit(as_json({"devices": [_plain(speed) for speed in found]}), json)
    slow = [speed for speed in found if speed.is_slow]
    if slow:
        told = ", ".join(f"{speed.device} (x{speed.factor:.3f})" for speed in slow)
        raise UnmetError(f"slow beside the others by more than {tolerance:g} %: device {told}")


def _with_two_live(config: JobConfig) -> JobConfig:
    live = config.live or (0, config.world_size - 1)
    if config.device == "null" or len(set(live)) != 2:
        raise UsageError(
            f"--live {', '.join(map(str, live))} on --device {config.device}: a check runs two of "
            "the job's ranks, on cpu or cuda"
        )
    return dataclasses.replace(config, live=live)


def _seen(config: JobConfig) -> list[Turn]:
    """What the live ranks of a run took, beside what was recorded of them."""
    run = load(config.out)
    turns = []
    for device, live in zip(config.live_on, run.result.live, strict=True):
        recorded = statistics.median(run.trace(live.rank).compute_ns_S.tolist())
        turn = Turn(
            device=device,
            rank=live.rank,
            computed_ns=live.median_step_ns - live.waited_ns,
            recorded_ns=max(round(recorded), 1),
            step_ns=live.median_step_ns,
        )
        turns.append(turn)
    return turns


def _plain(speed: DeviceSpeed) -> dict[str, Any]:
    return dataclasses.asdict(speed) | {"factor": speed.factor, "step_ns": speed.step_ns}


def _print(found: tuple[DeviceSpeed, ...]) -> None:
    table = Table(title="This machine's devices, by the job's own ranks")
    for name in ("device", "computation over recorded", "ranks", "step of the job", ""):
        table.add_column(name)
    for speed in found:
        ranks = ", ".join(f"{turn.rank}: x{turn.factor:.3f}" for turn in speed.turns)
        verdict = "slow" if speed.is_slow else ""
        step = duration(speed.step_ns)
        table.add_row(str(speed.device), f"x{speed.factor:.3f}", ranks, step, verdict)
    terminal().print(table)
