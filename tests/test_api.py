"""The Python API: what ``import prismscale as ps`` gives."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import prismscale as ps
from prismscale.api import perform
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from prismscale.processes.children import Child, Children, Program
from prismscale.processes.starter import Spawner
from prismscale.runfolder import RunFolder
from support.runs import write_program

SLOW = {1: 3.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ps.Run:
    """Four ranks of a small program."""
    folder = tmp_path_factory.mktemp("api")
    script = write_program(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return ps.run(
            script,
            world_size=4,
            samples=2,
            memory=False,
            step_marker="marker:step_ends",
            out=folder / "run",
        )


def test_public_names_are_few_and_there() -> None:
    """At most ten, each of them found."""
    assert len(ps.__all__) <= 10
    assert all(getattr(ps, name) is not None for name in ps.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ps.nothing  # type: ignore[attr-defined]


def test_a_run_says_what_its_folder_says(run: ps.Run) -> None:
    """Step, graph and traces are those of the files."""
    found = json.loads((run.folder / "results.json").read_text())
    assert run.step.ns == found["spread"]["p50_ns"]
    assert run.step.without_variation_ns == found["step_ns"]
    assert run.step.computation + run.step.communication + run.step.waiting == pytest.approx(1)
    assert (run.graph.world_size, run.trace(3).n_body) == (4, run.graph.classes[0].trace.n_body)
    assert run.memory == {}
    with pytest.raises(UsageError, match=r"ranks are 0 … 3"):
        run.trace(4)


def test_a_forecast_starts_from_the_runs_step(run: ps.Run) -> None:
    """Without variation it is the step; a slow rank makes it longer."""
    still = run.forecast(draws=3, variability="none")
    assert set(still.step_ns_D.tolist()) == {run.step.without_variation_ns}
    assert (
        run.forecast(draws=3, variability="none", slow=SLOW).base_ns > run.step.without_variation_ns
    )
    drawn = run.forecast(draws=50)
    assert drawn.quantile_ms(0.5) == float(np.median(drawn.step_ns_D)) / 1e6
    with pytest.raises(UsageError, match=r"quantile 95"):
        drawn.quantile_ms(95)


def test_notebooks_show_a_table(run: ps.Run) -> None:
    """Names of users stay text."""
    text = run._repr_html_()
    assert f"{run.step.ms:.3f} ms" in text
    assert "p95" in run.forecast(draws=20)._repr_html_()


def test_an_earlier_run_is_loaded(run: ps.Run, tmp_path: Path) -> None:
    """A folder without one is refused."""
    assert ps.load(run.folder).step == run.step
    with pytest.raises(UsageError, match="holds no run"):
        ps.load(tmp_path)


@dataclass
class NotingStarter:
    """Starts processes as usual, and keeps what they are."""

    slots: int = 2
    seen: list[str] = field(default_factory=list)

    def has_room(self) -> bool:
        """See :class:`prismscale.processes.starter.Starter`."""
        return True

    def start(self, children: Children, program: Program) -> Child:
        """See :class:`prismscale.processes.starter.Starter`."""
        self.seen.append(program.name)
        return Spawner().start(children, program)


def test_a_starter_of_ones_own_starts_every_process(tmp_path: Path) -> None:
    """Captures that were copied to another run folder are used there: only live ranks start."""
    config = JobConfig(
        script=Script(target=str(write_program(tmp_path / "program"))),
        world_size=2,
        cluster="h100-sxm",
        out=tmp_path / "captured",
        clock="virtual",
        samples=2,
        steps=2,
        memory=False,
        step_marker="marker:step_ends",
    )
    starter = NotingStarter()
    perform(config, starter=starter)
    assert starter.seen == ["0", "1"]
    beside = replace(config, out=tmp_path / "beside", live=(1,))
    with RunFolder(root=beside.out).opened(fresh=False):
        shutil.copytree(config.out / "captures", beside.out / "captures")
    starter.seen.clear()
    perform(beside, starter=starter)
    assert starter.seen == ["coordinator", "1"]
    assert not list(tmp_path.glob("*/logs/fork-server.log"))
