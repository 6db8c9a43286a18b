"""The command line: what it takes, and how it says no."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from prismscale import run_options
from prismscale.cli import Unwound
from prismscale.config import JobConfig
from prismscale.errors import ScriptError, StorageError
from prismscale.job import Job
from support.runs import prismscale, write_program


class Stop(Exception):
    """Raised in place of running a job."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """Configurations of jobs, which are not run."""
    seen: list[JobConfig] = []

    def keep(**fields: object) -> JobConfig:
        seen.append(JobConfig(**fields))  # type: ignore[arg-type]
        raise Stop

    monkeypatch.setattr(run_options, "JobConfig", keep)
    return seen


def configured(asked: list[JobConfig], *args: object) -> JobConfig:
    """What ``prismscale run ARGS`` asks for."""
    with pytest.raises(Stop):
        prismscale("run", *args)
    return asked[0]


@pytest.fixture
def script(tmp_path: object) -> str:
    return str(write_program(tmp_path))  # type: ignore[arg-type]


def test_everything_after_the_script_is_the_scripts(asked: list[JobConfig], script: str) -> None:
    """Even options that we have too."""
    config = configured(asked, "--world-size", 8, "--live", "0,2-4", script, "--live", "9", "-m")
    assert config.live == (0, 2, 3, 4)
    assert config.script.args == ("--live", "9", "-m")


@pytest.mark.parametrize("between", [(), ("--",)])
def test_a_module_takes_the_scripts_place(asked: list[JobConfig], between: tuple[str, ...]) -> None:
    """What follows its name is its own, as behind ``python -m``: options that are not ours too."""
    config = configured(asked, "--world-size", 8, "-m", "pkg.train", *between, "--tp", 4, "-m", "b")
    assert config.script.label == "-m pkg.train"
    assert config.script.args == ("--tp", "4", "-m", "b")


def test_options_before_a_module_stay_ours(asked: list[JobConfig]) -> None:
    """Flags take no value, other options one."""
    options = ("--fused", "--live", "3", "--device=null", "--world-size", 8)
    config = configured(asked, *options, "-mpkg", "--live", "9")
    assert (config.live, config.device, config.fused) == ((3,), "null", True)
    assert (config.script.target, config.script.args) == ("pkg", ("--live", "9"))


def test_slow_and_hung_ranks_are_read(asked: list[JobConfig], script: str) -> None:
    """RANK=FACTOR and RANK@stepN, as often as wanted."""
    faults = ["--slow", "1=1.5", "--slow", "2=3", "--hang", "7@step3", "--hang", "6@2"]
    config = configured(asked, "--world-size", 8, *faults, script)
    assert config.slow == {1: 1.5, 2: 3.0}
    assert config.hang == {7: 3, 6: 2}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--bogus"], "No such option: --bogus"),
        (["--world-size", "x"], "--world-size"),
        (["--world-size", "8"], "no script given"),
        (["--live", "0,x"], "'x' is not a rank"),
        (["--live", "5-3"], "'5-3' is not a range"),
        (["--live", "0-99999999999"], "is not a range"),
        (["--slow", "1=1.2.3"], "give RANK=FACTOR"),
        (["--slow", "1=0"], "the factor must lie"),
        (["--slow", "9=2"], "rank 9 does not exist"),
        (["--hang", "17"], "give RANK@stepN"),
        (["--live", "8"], "rank 8 does not exist in a world of 8"),
        (["--live", "1,1"], "names a rank twice"),
        (["--device", "tpu"], "allowed: cpu, cuda"),
        (["--clock", "sundial"], "allowed: paced, virtual"),
        (["--steps", "0"], "--steps is 0"),
        (["--compute-scale", "nan"], "--compute-scale is nan"),
        (["--capture-timeout", "0"], "--capture-timeout is 0"),
        (["--max-captures", "0"], "--max-captures is 0"),
        (["--cluster", "no.toml"], "no.toml"),
    ],
)
def test_a_wrong_option_is_one_clear_sentence(script: str, args: list[str], said: str) -> None:
    """Exit code 2, what was given, and no traceback."""
    program = [] if "no script" in said else [script]
    done = prismscale("run", "--world-size", "8", *args, *program)
    assert done.code == 2
    assert said in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("error:") == 1
    assert "Traceback" not in done.err


def test_the_world_size_must_be_given(script: str) -> None:
    """And be positive."""
    assert "--world-size is missing" in prismscale("run", script).err
    assert "world size is -1" in prismscale("run", "--world-size", "-1", script).err


def test_a_command_that_does_not_exist_is_refused() -> None:
    """Where the real ones are listed is said."""
    done = prismscale("fly")
    assert done.code == 2
    assert "No such command 'fly'; see" in done.err


def test_no_command_shows_the_help() -> None:
    """On the terminal, without an error."""
    done = prismscale()
    assert "Commands" in done.out + done.err
    assert "error:" not in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageError("no space [here]"), 7),
        (ScriptError("it failed", rank=3, traceback="Traceback: x[0]"), 3),
        (Unwound(signal.SIGINT), 130),
        (Unwound(signal.SIGTERM), 143),
    ],
)
def test_each_kind_of_end_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, script: str, error: BaseException, code: int
) -> None:
    """Brackets in messages are text, not markup."""

    def fail(job: Job) -> None:
        raise error

    monkeypatch.setattr(Job, "run", fail)
    done = prismscale("run", "--world-size", 8, "--out", f"{tmp_path}/run", script)
    assert done.code == code
    if isinstance(error, ScriptError):
        assert error.traceback in done.err
    if code < 128:
        assert f"error: {error}" in done.err


def test_a_command_pays_for_no_other() -> None:
    """``prismscale --version`` is there at once: commands import what they need when asked for."""
    ask = "import sys, prismscale.cli; print({'numpy', 'pyarrow', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
