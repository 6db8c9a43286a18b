"""One job, from a script to a report. This file shows how the data flows, and nothing else::

script + world size + cluster
   │ capture    a few ranks run the program, the rest are absent    → traces
   │ slices     as many as fit the cores run again, side by side    → their durations
   │   values   or all ranks run, a few at a time, with real values → traces of every rank
   │ assemble   rank classes and groups of every rank, verified     → JobGraph
   │ cost       a duration for every node                           → GraphDurations
   │ simulate   re-time the whole graph                             → Timeline
   │ forecast   the same with durations that vary                   → how the step varies
   │ live       chosen ranks run the program among replayed ones    → observations
   ▼ report     text, HTML, Perfetto, JSON
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from prismscale.analysis.observation import Observation
from prismscale.analysis.payload_use import mirror_blamed
from prismscale.analysis.result import RunResult, StandstillResult
from prismscale.analysis.stages import shown_ranks
from prismscale.analysis.summary import Findings, summarise
from prismscale.analysis.wanted import Wanted
from prismscale.capture.co_run import co_runs_to_time, time_co_runs
from prismscale.capture.plan import CapturePlan, CapturePlanner
from prismscale.capture.unusual_steps import find_events, store_events
from prismscale.capture.whole_programs import deviating_step, whole_programs
from prismscale.cluster import Cluster
from prismscale.config import JobConfig
from prismscale.devices.null.build import build_extension, is_built
from prismscale.diagnosis.explain import explain, explained, refuse_standstill
from prismscale.durations.altered import Alteration
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.step_spread import step_spread
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import GroupTable, collect_groups
from prismscale.graph.io import save_graph
from prismscale.graph.periodic import Calendar, PeriodicEvent, ordinary_from, scheduled
from prismscale.graph.pooling import pool_samples
from prismscale.graph.trace import RankTrace
from prismscale.graph.verify import verify
from prismscale.job_parts import (
    capture_runner,
    checked_ranks,
    emulated_ranks,
    fork_server,
    live_stage,
    payload_uses,
    router_findings,
    switch_counts,
    switching_stage,
    work_of,
)
from prismscale.live.live_spec import LogLine
from prismscale.processes.footprint import Footprint
from prismscale.processes.starter import Starter
from prismscale.progress import NotedUpdate, Reporter, SilentReporter
from prismscale.report.folder import write_report
from prismscale.runfolder import RunFolder
from prismscale.sim.event_cost import event_costs
from prismscale.sim.hoped import hoped_job
from prismscale.sim.retime import retime


@dataclass(kw_only=True)
class Job:
    """The stages of one run and what passes between them."""

    config: JobConfig
    folder: RunFolder
    reporter: Reporter
    log_line: LogLine
    starter: Starter | None = None
    """Starts all processes. None: they are forks of a server that has done their imports."""
    executor: Executor | None = None
    """Draws the steps of the forecast. None: this process draws them."""
    wanted: Wanted = field(default_factory=Wanted)
    """What the user asks of the answers."""
    wall_s: dict[str, float] = field(default_factory=dict)

    def run(self) -> RunResult:
        """Run every stage and return the contents of ``results.json``.

        Raises:
            PrismscaleError: any of its subclasses; no half-written file is left behind.
        """
        config = self.config
        cluster = config.load_cluster()
        # The key is computed only once, because it covers the program's files. The path is
        # absolute, because the program may change its working folder.
        captures = self.folder.captures(config.capture_key(cluster)).absolute()
        if config.device == "null" and not is_built():
            # Compile here, where progress is shown: the output of a rank only goes to its log.
            with self._stage("compile"):
                build_extension()
        blamed = mirror_blamed(config.payload_kind)
        with blamed, Footprint() as footprint, self._starting() as starter:
            plan, traces = self._capture(cluster, captures, starter)
            with self._stage("assemble"):
                groups = collect_groups(traces, config.world_size, plan.representative_R)
                graph = assemble(traces, plan.representative_R, groups)
                with explained(graph, self.folder.flight):
                    verify(graph)
                save_graph(graph, self.folder.graph)
                emulated = emulated_ranks(config, captures, traces)
                payloads = payload_uses(config, captures, traces)
                routers = router_findings(config, captures, traces, emulated)
                events = find_events(captures, traces)
                stored, unmatched = store_events(
                    events, traces, plan.representative_R, groups, emulated, self.folder.periodic
                )
                if unmatched or deviating_step(captures, traces, plan.representative_R):
                    whole = whole_programs(captures, traces, plan.representative_R, groups)
                    refuse_standstill(whole, self.folder.flight)
            with self._stage("simulate"), explained(graph, self.folder.flight):
                scenario = config.scenario(cluster, f"captures/{captures.name}")
                scenario.save(self.folder.scenario)
                alteration = Alteration(scenario=scenario, root=self.folder.root)
                hoped = hoped_job(graph, alteration)
                durations = hoped.durations
                shown = {*config.shown, *config.live, *shown_ranks(graph)}
                retimed = retime(durations, ranks=shown)
                usual_ns = hoped.step_without_ns or retimed.step_ns
                costed = () if config.hang else event_costs(stored, hoped.scenario, usual_ns)
                standstill = self._standstill(plan, traces, groups) if config.hang else None
                work = work_of(config, graph, captures)
            with self._stage("forecast"):
                spread = None
                if not config.hang:
                    spread = step_spread(self.folder.root, executor=self.executor)
            observed = []
            if config.live:
                running = alteration.costed_traces(traces)
                running = running if config.hang else self._scheduled(running, events)
                observed = self._live(plan, running, groups, alteration, captures, starter)
        result = summarise(
            Findings(
                graph=durations.graph,
                durations=durations,
                retimed=retimed,
                observed=observed,
                distinct_axes=plan.distinct,
                witnesses=plan.witnesses,
                memory={r: t.memory for r, t in sorted(traces.items()) if t.memory is not None},
                captured=tuple(sorted(traces)),
                emulated=emulated,
                payload=config.payload_kind,
                payloads=payloads,
                routers=routers,
                events=tuple(costed),
                unmatched=unmatched,
                switched=switch_counts(captures) if config.values == "real" else None,
                effects=hoped.effects,
                step_without_ns=hoped.step_without_ns,
                checked=plan.checked,
                standstill=standstill,
                work=work,
                spread=spread,
            ),
            command=config.script.command,
            cluster=cluster,
            device=config.device,
            variability=scenario.variability.name if scenario.variability else "",
            wanted=self.wanted,
            wall_s=self.wall_s,
            peak_rss_bytes=footprint.peak_bytes,
        )
        with self._stage("report"):
            write_report(self.folder, result, retimed.timeline, durations)
        return result

    def _capture(
        self, cluster: Cluster, folder: Path, starter: Starter
    ) -> tuple[CapturePlan, dict[int, RankTrace]]:
        config, logs = self.config, self.folder.logs
        if config.values == "real":
            return self._run_all(cluster, folder, starter)
        with self._stage("capture") as update:
            runner = capture_runner(
                config, cluster, starter=starter, folder=folder, logs=logs, progress=update
            )
            planner = CapturePlanner(
                traces=runner.traces,
                capture=runner.capture,
                world_size=config.world_size,
                max_captures=config.max_captures,
                also=config.capture,
                quick=config.quick,
            )
            plan = planner.plan()
        if config.check_s:
            with self._stage("check"):
                plan = checked_ranks(planner, runner, config.check_s)
        slices = co_runs_to_time(runner)
        if slices:
            with self._stage("slices") as update:
                time_co_runs(runner, slices, update)
        return plan, pool_samples(runner.traces, plan.representative_R)

    def _run_all(
        self, cluster: Cluster, folder: Path, starter: Starter
    ) -> tuple[CapturePlan, dict[int, RankTrace]]:
        """Run every rank with real values, so that no rank represents another."""
        with self._stage("values") as update:
            stage = switching_stage(
                self.config,
                cluster,
                starter=starter,
                folder=folder,
                logs=self.folder.logs,
                progress=update,
            )
            traces = dict(enumerate(stage.run()))
        return CapturePlan.of_all(traces[0]), traces

    def _standstill(
        self, plan: CapturePlan, traces: dict[int, RankTrace], groups: GroupTable
    ) -> StandstillResult:
        """Find which ranks cause the standstill, in a job with hung ranks."""
        hang = self.config.hang
        alone = assemble(traces, plan.representative_R, groups, alone=hang)
        finding = explain(alone, hang, self.folder.flight)
        return StandstillResult(
            cause=finding.cause.value,
            culprits=finding.culprits,
            site=finding.site,
            text=finding.text(),
            folder=str(self.folder.flight),
        )

    def _scheduled(
        self, traces: dict[int, RankTrace], events: list[PeriodicEvent]
    ) -> dict[int, RankTrace]:
        """Return the programs that live ranks and their virtual peers run.

        Each periodic event is written out in the steps in which it comes.
        """
        if not events:
            return traces
        first = max(ordinary_from(t) for t in traces.values())
        until = first + self.config.steps + 1
        calendar = Calendar(schedules=tuple(event.schedule for event in events))
        unknown = next((n for n in range(first, until) if not calendar.is_known(n)), None)
        if unknown is not None:
            raise UsageError(
                f"in step {unknown} of the program several periodic events fall together, as they "
                f"did in none of the steps that were watched: give --watch-steps {unknown + 1}, or "
                f"fewer live steps (--steps {max(unknown - first - 1, 1)})"
            )
        return {
            rank: scheduled(trace, [e.traces[rank] for e in events], calendar, until)
            for rank, trace in traces.items()
        }

    def _live(
        self,
        plan: CapturePlan,
        traces: dict[int, RankTrace],
        groups: GroupTable,
        alteration: Alteration,
        captures: Path,
        starter: Starter,
    ) -> list[Observation]:
        config, logs, cluster = self.config, self.folder.logs, alteration.scenario.cluster
        folder = self.folder.observations(config.live_key(cluster)).absolute()
        stage = live_stage(
            config, cluster, starter=starter, captures=captures, folder=folder, logs=logs
        )
        with self._stage("live", silent=config.attach is not None) as update:
            return stage.observe(
                lambda: alteration.ordered(
                    assemble(traces, plan.representative_R, groups, alone=config.live)
                ),
                self.log_line,
                lambda done: update(done, len(config.live)),
            )

    def _starting(self) -> AbstractContextManager[Starter]:
        if self.starter is not None:
            return nullcontext(self.starter)
        return fork_server(self.config, self.folder.logs)

    @contextmanager
    def _stage(self, name: str, *, silent: bool = False) -> Iterator[NotedUpdate]:
        began = time.monotonic()
        reporter = SilentReporter() if silent else self.reporter
        with reporter.stage(name) as update:
            yield update
        self.wall_s[name] = time.monotonic() - began
