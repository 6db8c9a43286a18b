"""Builds the parts of a job's stages: process runners, specs of rank processes, and findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismscale.analysis.emulated import Emulated
from prismscale.analysis.job_work import JobWork, job_work
from prismscale.analysis.overload import RouterFindings, RouterUse, findings_of, modelled_use
from prismscale.analysis.payload_use import PayloadUses, all_uses, refuse_idle_rules
from prismscale.analysis.switched import SwitchCounts
from prismscale.capture.capture_spec import CaptureSpec, payload_path, routers_path
from prismscale.capture.launcher import CaptureRunner
from prismscale.capture.plan import CapturePlan, CapturePlanner
from prismscale.cluster import Cluster
from prismscale.config import JobConfig
from prismscale.devices.routing import Routing
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.live.live_spec import ASSISTANT_PROCESS, COORDINATOR_PROCESS, LiveSpec
from prismscale.payload.recordings.selection import EVERYTHING, recordings_of
from prismscale.processes.fork_server import ForkServer
from prismscale.processes.starter import Starter
from prismscale.progress import NotedUpdate, StageUpdate
from prismscale.switching.switched_spec import SwitchedSpec
from prismscale.typed_files import load_json

if TYPE_CHECKING:
    # These import torch, which takes seconds: only jobs with such a stage wait for it.
    from prismscale.live.stage import LiveStage
    from prismscale.switching.all_ranks import SwitchingStage

WARM_UP_STEPS = 2
"""With real values, number of steps before the sampled ones."""
PRELOADED = (
    CaptureSpec.PROCESS,
    LiveSpec.PROCESS,
    COORDINATOR_PROCESS,
    ASSISTANT_PROCESS,
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""Modules that are already imported in the process of every rank.

A program imports some of them anyway. No module is listed that makes a tensor while it is imported,
as ``torch.distributed.pipelining`` does: the tensor would be missing in the program's own memory.
``torch._dynamo`` is the part of that module that takes long to import."""


PRELOADED_TO_COMPILE = ("torch._inductor.compile_fx",)
"""Modules that ``torch.compile`` imports. They take half as long as all of :data:`PRELOADED`, so
only jobs that compile preload them."""
LEARNED = (
    *PRELOADED_TO_COMPILE,
    *("aiohttp", "datasets", "huggingface_hub", "networkx", "pandas", "requests", "sympy"),
    *("torch.distributed.checkpoint", "torch.utils.tensorboard", "tyro", "yaml"),
)
"""Modules that are already imported in later ranks if the first ranks imported them.

Each takes long to import, needs no device and no rank, and makes no tensor while it is imported."""
COMPILES = ("torch.compile(", "flex_attention")


def fork_server(config: JobConfig, logs: Path) -> ForkServer:
    """Return the server that starts all ranks of a job, captured and live."""
    return ForkServer(preload=preloaded(config), learn=LEARNED, log=logs / "fork-server.log")


def preloaded(config: JobConfig) -> tuple[str, ...]:
    """Return the modules that are already imported in the ranks of a job."""
    compiles = config.script.mentions(COMPILES) and not config.fused
    return (*PRELOADED, *(PRELOADED_TO_COMPILE if compiles else ()))


def capture_runner(
    config: JobConfig,
    cluster: Cluster,
    *,
    starter: Starter,
    folder: Path,
    logs: Path,
    progress: StageUpdate,
) -> CaptureRunner:
    """Return the runner that captures ranks; ``folder`` takes their traces."""
    return CaptureRunner(
        spec=CaptureSpec(
            **_of_any_rank(config, cluster, captures=folder),
            rank=0,
            samples=config.samples,
            watched_steps=config.steps_to_watch if config.device == "null" else 0,
            track_memory=config.memory,
            out=str(folder),
        ),
        logs=logs,
        jobs=starter.slots,
        starter=starter,
        timeout_s=config.capture_timeout_s,
        progress=progress,
        whole=frozenset(config.capture),
    )


def checked_ranks(planner: CapturePlanner, runner: CaptureRunner, seconds: float) -> CapturePlan:
    """Capture the first steps of further ranks until ``seconds`` have passed.

    Ranks that do the same as another rank are not kept, because they would change no figure.
    """
    deadline = time.monotonic() + seconds
    planner.capture = runner.check
    plan = planner.check(lambda: time.monotonic() < deadline, runner.jobs)
    for rank in plan.checked:
        if plan.representative_R[rank] != rank:
            del runner.traces[rank]
    return replace(plan, witnesses=tuple(r for r in plan.witnesses if r in runner.traces))


def switching_stage(
    config: JobConfig,
    cluster: Cluster,
    *,
    starter: Starter,
    folder: Path,
    logs: Path,
    progress: NotedUpdate,
) -> SwitchingStage:
    """Return the stage that runs all ranks with real values; ``folder`` takes their traces."""
    from prismscale.switching.all_ranks import SwitchingStage

    return SwitchingStage(
        spec=SwitchedSpec(
            **_of_any_rank(config, cluster, captures=folder),
            rank=0,
            samples=config.samples,
            marks=config.samples + WARM_UP_STEPS,
            track_memory=config.memory,
            out=str(folder),
            address="",
            values="",
            record=config.record,
            record_limit_bytes=config.record_limit_bytes,
        ),
        slots=config.slots or starter.slots,
        budget_bytes=config.budget_bytes,
        logs=logs,
        starter=starter,
        progress=progress,
    )


def switch_counts(folder: Path) -> SwitchCounts:
    """Load the counts of slots and switches of the run whose traces ``folder`` holds."""
    from prismscale.switching.all_ranks import DONE

    return load_json(SwitchCounts, folder / DONE, "the end of a run with real values")


def emulated_ranks(config: JobConfig, captures: Path, ranks: Iterable[int]) -> tuple[Emulated, ...]:
    """Load what the captured ranks of a null device recorded; empty for other devices."""
    if config.device != "null":
        return ()
    return tuple(Emulated.load(captures / f"rank-{rank}.null.json") for rank in sorted(ranks))


def payload_uses(
    config: JobConfig, captures: Path, traces: Mapping[int, RankTrace]
) -> tuple[PayloadUses, ...]:
    """Load where the values came from that absent peers contributed to captured ranks.

    A rank that was found equal to another rank ended early, at a point that depends on when it was
    found. The other rank's record is used for it.

    Raises:
        UsageError: a rule answered none of their communications.
    """
    if config.values == "real":
        return ()
    ran = [traces[rank].captured_as for rank in sorted(traces)]
    found = tuple(PayloadUses.load(payload_path(captures, rank)) for rank in ran)
    refuse_idle_rules(all_uses(found))
    return found


def router_findings(
    config: JobConfig,
    captures: Path,
    traces: Mapping[int, RankTrace],
    emulated: Iterable[Emulated],
) -> RouterFindings:
    """Return what the routers of experts chose.

    Raises:
        UsageError: ``--routing`` applied to none of the routers.
    """
    groups = {
        trace.groups[int(index)].ranks
        for trace in traces.values()
        for index in set(trace.group_index_N[trace.op_N == CollectiveOp.ALL_TO_ALL].tolist())
    }
    if config.device == "null":
        shares = partial(config.routing.shares_in, 0)
        uses = {r: modelled_use(e, shares) for r, e in zip(sorted(traces), emulated, strict=True)}
        return findings_of(uses, sorted(groups))
    paths = {rank: routers_path(captures, rank) for rank in sorted(traces)}
    uses = {rank: RouterUse.load(path) for rank, path in paths.items()}
    found = findings_of(uses, sorted(groups))
    if config.routing != Routing() and not found.mocked:
        raise UsageError(
            "--routing: no router of the captured ranks was found that has as many experts: one "
            "that chooses by topk over the last dimension of its scores; take the option out, or "
            "give loads of as many experts as the program has"
        )
    return found


def work_of(config: JobConfig, graph: JobGraph, captures: Path) -> JobWork:
    """Return the operations and tokens of a step, which are known on a null device only.

    The operations are those of the program. Left out is what a what-if changes: all of them where
    products have another element type, the executed ones where nothing is recomputed.
    """
    if config.device != "null":
        return JobWork()
    work, what_ifs = job_work(graph, captures), WhatIfs.parse(config.what_ifs)
    if what_ifs.changes_dtypes:
        return JobWork(tokens=work.tokens)
    return work if what_ifs.recomputes else replace(work, executed_flops=0.0)


def live_stage(
    config: JobConfig,
    cluster: Cluster,
    *,
    starter: Starter,
    captures: Path,
    folder: Path,
    logs: Path,
) -> LiveStage:
    """Return the stage that runs live ranks; ``folder`` takes their observations."""
    from prismscale.live.stage import LiveStage

    return LiveStage(
        spec=LiveSpec(
            **_of_any_rank(config, cluster, captures=captures),
            rank=config.live[0],
            steps=config.steps,
            clock=config.clock,
            live=config.live,
            live_on=config.live_on,
            trace="",
            exchange="",
            socket="",
            out=str(folder),
            recordings=str(recordings_of(captures)) if config.values == "real" else "",
            objects_are_recorded=EVERYTHING in config.record,
            transfers=config.transfers,
            what_ifs=config.what_ifs,
        ),
        folder=folder,
        logs=logs,
        starter=starter,
        cluster=config.cluster,
        slow=config.slow,
        hang=config.hang,
        compute_scale=config.compute_scale,
        attach=config.attach,
    )


def _of_any_rank(config: JobConfig, cluster: Cluster, captures: Path) -> dict[str, Any]:
    return {
        "world_size": config.world_size,
        "local_world_size": cluster.devices_per_node,
        "target": config.script.target,
        "is_module": config.script.is_module,
        "args": config.script.args,
        "device": config.device,
        "step_marker": config.step_marker,
        "communication_load": cluster.processor_communicates,
        "payloads": str(captures / "payloads"),
        "payload": config.payload_kind,
        "trusts_objects": config.trusts_objects,
        "rules": config.rules.path if config.rules else "",
        "devices_per_domain": cluster.devices_per_domain,
        "gpu": cluster.device,
        "kernels": str(config.kernels.absolute()) if config.kernels else "",
        "fused": config.fused,
        "routing": config.routing,
        "stand_ins": config.stand_ins,
        "storage_bytes_per_s": config.storage.write_bytes_per_s,
    }
