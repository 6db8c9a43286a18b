"""What a run is asked to do, and when its earlier stages can be used again."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

import prismscale as ps
from prismscale.api import DEFAULT_OUT
from prismscale.cluster import Cluster
from prismscale.config import MAX_WORLD_SIZE, JobConfig
from prismscale.devices.routing import Routing
from prismscale.devices.stand_in_file import StandInFile
from prismscale.devices.storage import Storage
from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from prismscale.files import write_json
from prismscale.payload.rules.rule_file import RuleFile
from support.runs import prismscale, write_program

RULES = __file__
"""Any Python: rules are read when ranks run."""
LEAST = JobConfig(
    script=Script(target=__file__), world_size=16, cluster="h100-sxm", out=DEFAULT_OUT
)
"""A job of which only program and world size are told."""
ALL = JobConfig(
    script=Script(target="train", args=("7",), is_module=True),
    world_size=32,
    cluster="b200",
    out=Path("elsewhere"),
    live=(0, 2),
    attach=2,
    device="null",
    clock="virtual",
    samples=5,
    watched_steps=6,
    steps=7,
    shown=(3,),
    step_marker="marker:step_ends",
    max_captures=9,
    capture=(3, 16, 17),
    check_s=300.0,
    capture_timeout_s=10.0,
    memory=False,
    fresh=True,
    compute_scale=1.5,
    kernels=Path("kernels.json"),
    fused=True,
    routing=Routing(exponent=1.5),
    stand_ins=(StandInFile(module="my_kernels", path=__file__),),
    storage=Storage(write_bytes_per_s=3e9),
    variability="none",
    slow={1: 2.0},
    hang={4: 5},
    what_ifs=("dtype=fp8",),
    payload="rules",
    rules=RuleFile(path=RULES),
    trusts_objects=True,
)
"""A job of which everything is told."""
ALL_WORDS = f"""--world-size 32 --cluster b200 --out elsewhere --live 0,2 --attach 2 --device null
    --clock virtual --samples 5 --watch-steps 6 --steps 7 --show 3 --step-marker marker:step_ends
    --max-captures 9 --capture 3,16-17 --check 5m --capture-timeout 10
    --no-memory --fresh --compute-scale 1.5
    --kernels kernels.json --fused --routing zipf:1.5 --storage 3
    --variability none --what-if dtype=fp8 --payload rules --rules {RULES} --slow 1=2 --hang 4@step5
    --trust-objects --stand-in my_kernels={__file__} -m train 7"""
NOT_IN_PYTHON = {
    "live_on": "check-devices says on which",
    "values": "for programs whose branches depend on values",
    "slots": "the same",
    "budget_bytes": "the same",
    "record": "for live ranks that hear real values",
    "record_limit_bytes": "the same",
    "trusts_objects": "for run folders of others",
    "transfers": "for live ranks that send real bytes",
    "payload": "for what absent peers say, which the command reports",
    "rules": "the same",
    "attach": "for a debugger in a terminal",
    "clock": "for a look at live ranks without their waits",
    "shown": "for a look at the timeline",
    "watched_steps": "given when an error of the command asks for it",
    "max_captures": "the same",
    "capture_timeout_s": "the same",
    "capture": "for hangs, which the command explains",
    "check_s": "the same",
    "quick": "for sweeps of many layouts",
    "routing": "only where a program routes tokens to experts",
    "stand_ins": "only for extensions that exist as CUDA binaries alone",
    "storage": "only of a null device's checkpoints",
}
"""Fields that ``prismscale.run`` leaves to the command line, and why."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """What runs are asked to do, none of which is made."""
    found: list[JobConfig] = []

    def note(config: JobConfig, **_: object) -> None:
        found.append(config)
        raise SystemExit

    # In this order: the command takes its name from the other module when it is first imported.
    monkeypatch.setattr("prismscale.commands.run.perform", note)
    monkeypatch.setattr("prismscale.api.perform", note)
    return found


def test_what_is_not_told_is_the_same_everywhere(asked: list[JobConfig]) -> None:
    """The command line and Python have the configuration's own defaults."""
    prismscale("run", "--world-size", 16, __file__)
    with pytest.raises(SystemExit):
        ps.run(__file__, world_size=16)
    assert asked == [LEAST, LEAST]


ONLY_ALONE = {
    "values",
    "slots",
    "budget_bytes",
    "record",
    "record_limit_bytes",
    "transfers",
    "live_on",
    "quick",
}
"""Fields that allow no others beside them; ``live_on`` is told by ``check-devices --on``."""


def test_everything_can_be_told_on_the_command_line(asked: list[JobConfig]) -> None:
    """A field that is new needs an option, and its place in this test."""
    alike = {f.name for f in fields(JobConfig) if getattr(ALL, f.name) == getattr(LEAST, f.name)}
    assert alike == ONLY_ALONE
    prismscale("run", *ALL_WORDS.split())
    assert asked == [ALL]


def test_real_values_are_told_on_the_command_line(asked: list[JobConfig]) -> None:
    """On a processor, where they exist."""
    prismscale("run", "--world-size", 16, "--values", "real", "--slots", 3, __file__)
    assert asked == [replace(LEAST, values="real", slots=3)]


def test_fewer_ranks_are_asked_for_on_the_command_line(asked: list[JobConfig]) -> None:
    """Without --check, which asks for more."""
    prismscale("run", "--world-size", 16, "--quick", __file__)
    assert asked == [replace(LEAST, quick=True)]
    with pytest.raises(UsageError, match="give one of them"):
        replace(LEAST, quick=True, check_s=1.0)


def test_python_can_tell_all_but_what_is_left_out(asked: list[JobConfig]) -> None:
    """What it takes goes where the command line puts it."""
    own = {f.name for f in fields(JobConfig)} - {"script"} - set(NOT_IN_PYTHON)
    program = {"script": ALL.script.target, "args": ("7",), "is_module": True}
    assert set(inspect.signature(ps.run).parameters) == own | set(program)
    with pytest.raises(SystemExit):
        ps.run(**program, **{name: getattr(ALL, name) for name in own})  # type: ignore[arg-type]
    assert asked == [replace(ALL, **{name: getattr(LEAST, name) for name in NOT_IN_PYTHON})]


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    script = write_program(tmp_path / "program")
    return JobConfig(
        script=Script(target=str(script)), world_size=16, cluster="h100-sxm", out=tmp_path / "run"
    )


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.load("h100-sxm")


@pytest.mark.parametrize("world_size", [0, MAX_WORLD_SIZE + 1])
def test_impossible_worlds_are_refused(config: JobConfig, world_size: int) -> None:
    """With what is allowed."""
    with pytest.raises(UsageError, match="allowed: 1"):
        replace(config, world_size=world_size)


def test_a_world_must_fill_its_nodes(config: JobConfig) -> None:
    """8 devices a node: 20 ranks do not."""
    with pytest.raises(UsageError, match="does not fill nodes of 8"):
        replace(config, world_size=20).load_cluster()


def test_the_same_job_has_the_same_key(config: JobConfig, cluster: Cluster) -> None:
    """Also for another folder or other live ranks."""
    key = config.capture_key(cluster)
    assert replace(config, live=(3,), out=Path("elsewhere")).capture_key(cluster) == key


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 32},
        {"samples": 9},
        {"step_marker": "a:b"},
        {"memory": False},
        {"device": "null", "routing": Routing(exponent=1.0)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_captures_of_another_measurement_are_not_used(
    config: JobConfig, cluster: Cluster, change: dict[str, int]
) -> None:
    """World, samples, marker and memory change what is captured."""
    assert replace(config, **change).capture_key(cluster) != config.capture_key(cluster)


def test_other_prices_are_captured_anew(config: JobConfig, cluster: Cluster) -> None:
    """A null device's trace holds what its kernels cost."""
    null = replace(config, device="null")
    assert replace(null, fused=True).capture_key(cluster) != null.capture_key(cluster)


@pytest.mark.parametrize("change", [{"fused": True}, {"kernels": Path("kernels.json")}])
def test_prices_are_a_null_devices(config: JobConfig, change: dict[str, object]) -> None:
    """A processor's kernels cost what they take."""
    with pytest.raises(UsageError, match="--device null, not of cpu"):
        replace(config, **change)


def test_kernel_times_are_read_before_anything_starts(config: JobConfig) -> None:
    """No such file is no such job."""
    null = replace(config, device="null", kernels=Path("nowhere.json"))
    with pytest.raises(UsageError, match=r"cannot read kernel table '.*nowhere.json'"):
        null.load_cluster()


def test_an_edited_program_is_captured_anew(config: JobConfig, cluster: Cluster) -> None:
    """Also where only a file beside the script changed."""
    key = config.capture_key(cluster)
    (Path(config.script.target).parent / "marker.py").write_text("changed = True\n")
    assert config.capture_key(cluster) != key


def test_an_edited_package_beside_the_script_is_captured_anew(
    config: JobConfig, cluster: Cluster
) -> None:
    """However deep the file lies."""
    inner = Path(config.script.target).parent / "models" / "parts"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    key = config.capture_key(cluster)
    (inner / "layer.py").write_text("wide = True\n")
    assert config.capture_key(cluster) != key


def test_an_edited_module_is_captured_anew(
    config: JobConfig, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is found from where the command runs; none of it is run for that."""
    package = tmp_path / "trainer_of_ours"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    module = replace(config, script=Script(target="trainer_of_ours.train", is_module=True))
    key = module.capture_key(cluster)
    (package / "train.py").write_text("print('steps')\n")
    assert module.capture_key(cluster) != key


@pytest.mark.parametrize("argument", ["{}", "--config={}", "@{}"])
def test_edited_settings_are_captured_anew(
    config: JobConfig, cluster: Cluster, tmp_path: Path, argument: str
) -> None:
    """Of a file that an argument names, wherever it lies."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("layers: 2")
    given = replace(config, script=replace(config.script, args=(argument.format(settings),)))
    key = given.capture_key(cluster)
    assert given.capture_key(cluster) == key
    settings.write_text("layers: 4")
    assert given.capture_key(cluster) != key


def test_another_environment_is_captured_anew(
    config: JobConfig, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What frameworks read, and not where a terminal is."""
    key = config.capture_key(cluster)
    monkeypatch.setenv("COLUMNS", "77")
    assert config.capture_key(cluster) == key
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert config.capture_key(cluster) != key


def test_an_edited_library_is_captured_anew(
    config: JobConfig, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is found by PYTHONPATH, as Megatron-LM usually is."""
    (tmp_path / "library").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    key = config.capture_key(cluster)
    (tmp_path / "library" / "layers.py").write_text("wide = True\n")
    assert config.capture_key(cluster) != key


@pytest.mark.parametrize(
    "change",
    [{"live": (1,)}, {"steps": 3}, {"clock": "virtual"}, {"slow": {1: 2.0}}, {"hang": {1: 2}}],
    ids=lambda c: next(iter(c)),
)
def test_observations_of_another_live_run_are_not_used(
    config: JobConfig, cluster: Cluster, change: dict[str, object]
) -> None:
    """Who is live, how long, on which clock, with which faults, and on which cluster."""
    assert replace(config, **change).live_key(cluster) != config.live_key(cluster)
    assert config.live_key(Cluster.load("a100-80g")) != config.live_key(cluster)


def test_arguments_of_any_bytes_can_be_stored(tmp_path: Path) -> None:
    """An undecodable byte is half of a surrogate pair in Python, and comes back as it was."""
    arguments = ["--name=\udcff", "ü"]
    write_json(tmp_path / "a.json", arguments)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == arguments
    write_json(tmp_path / "a.json", "ü")
    assert "ü" in (tmp_path / "a.json").read_text(encoding="utf-8")
