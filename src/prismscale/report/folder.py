"""Writes the results and reports of a run into its folder, and reads them back."""

from __future__ import annotations

from collections.abc import Iterable

from prismscale.analysis.result import RunResult
from prismscale.durations.altered import Alteration
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.files import write_json, write_text
from prismscale.formats.perfetto import Args, write_perfetto
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import NodeKind
from prismscale.report.html import Section, render
from prismscale.report.memory_curves import memory_curves
from prismscale.report.memory_section import answers_section, memory_sections
from prismscale.report.sections import run_sections
from prismscale.runfolder import RunFolder
from prismscale.sim.timeline import Timeline
from prismscale.sim.timeline_io import load_timeline, save_timeline
from prismscale.typed_files import read_json


def write_report(
    folder: RunFolder, result: RunResult, timeline: Timeline, durations: GraphDurations
) -> None:
    """Write ``results.json``, ``timeline.parquet``, the Perfetto trace and ``report.html``.

    Each file is written completely or not at all. The HTML report comes last, because it names the
    others.

    Raises:
        StorageError: a file cannot be written.
    """
    write_json(folder.results, result.to_json())
    save_timeline(timeline, folder.timeline)
    write_perfetto(
        folder.trace,
        {"predicted": timeline},
        annotate=_DurationSource(durations, "modelled" if result.device == "null" else "measured"),
        curves=memory_curves(folder, timeline.ranks),
    )
    write_page(folder, result, timeline)


def write_page(
    folder: RunFolder, result: RunResult, timeline: Timeline, extra: Iterable[Section] = ()
) -> None:
    """Write ``report.html`` with the sections of a run and the ``extra`` ones."""
    sections = [*run_sections(result, timeline), *memory_sections(folder, result), *extra]
    if not result.hung:
        sections.append(answers_section(result))
    write_text(folder.report, render(result, sections))


def read_results(folder: RunFolder) -> RunResult:
    """Read ``results.json`` of a run.

    Raises:
        UsageError: there is no finished run in the folder.
        FormatError: the file is damaged or of another kind.
    """
    if not folder.results.exists():
        raise UsageError(
            f"{folder.root} holds no finished run; make one with prismscale run --out {folder.root}"
        )
    value = read_json(folder.results)
    # A forecast of an import adds its section to a file that holds no run.
    if isinstance(value, dict) and "command" not in value:
        raise UsageError(f"{folder.root} holds an import, and no run; prismscale run makes one")
    return RunResult.from_json(value, str(folder.results))


def read_run(folder: RunFolder) -> tuple[RunResult, Timeline]:
    """Read what :func:`write_report` wrote, for ``write_page(folder, *read_run(folder), …)``.

    Raises:
        UsageError: there is no finished run in the folder.
        FormatError: a file is damaged or of another kind.
    """
    result = read_results(folder)
    graph = load_graph(folder.graph)
    if folder.scenario.is_file():
        # The graph is stored as it was captured; the timeline is of one with the scenario's edges.
        alteration = Alteration(scenario=Scenario.load(folder.scenario), root=folder.root)
        graph = alteration.ordered(graph)
    return result, load_timeline(folder.timeline, graph)


class _DurationSource:
    """Annotates each node of a Perfetto trace with the source of its duration.

    ``computation`` is the source of all computation's.
    """

    def __init__(self, durations: GraphDurations, computation: str) -> None:
        self._model, self._computation = type(durations.model).__name__, computation

    def __call__(self, rank_class: RankClass, node: int) -> Args:
        trace = rank_class.trace
        if trace.kind_N[node] == NodeKind.COMPUTE:
            return {"duration from": self._computation}
        body = node - trace.n_prologue
        measured_ns = trace.body_ns_SB[:, body].max(initial=0) if body >= 0 else 0
        return {"duration from": "measured" if measured_ns > 0 else self._model}
