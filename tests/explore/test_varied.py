"""What ``--vary`` says, and the command lines that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from prismscale.explore.points import BaseCommand, SweepPoint, points_of
from prismscale.explore.varied import parse_all, unheard_of

RUN_OPTIONS = {"--cluster", "--slow", "--samples", "--fused", "--world-size"}
OPTIONS = (("--world-size", ("--world-size", "64")), ("--cluster", ("--cluster", "h100-sxm")))


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("parser.add_argument('--tp')\n")
    return str(path)


def points(script: str, *vary: str, args: str = "", where: str = "") -> list[SweepPoint]:
    """Those of a program with these arguments."""
    base = BaseCommand(
        options=OPTIONS,
        script=Script(target=script, args=tuple(args.split())),
        repeatable=frozenset({"--slow"}),
    )
    varied = parse_all(vary, run_options=RUN_OPTIONS, program=base.script.args)
    return points_of(base, varied, where)


def programs(script: str, *vary: str, args: str = "") -> list[str]:
    """The program's arguments at each point."""
    found = (point.arguments for point in points(script, *vary, args=args))
    return [" ".join(arguments[arguments.index("--") + 2 :]) for arguments in found]


def test_every_combination_is_a_point(script: str) -> None:
    """In the order of the command line, the last one changing fastest."""
    found = points(script, "--tp {2,4}", "--pp {1,8}")
    assert [p.label for p in found] == ["tp=2 pp=1", "tp=2 pp=8", "tp=4 pp=1", "tp=4 pp=8"]


def test_an_option_takes_its_own_place(script: str) -> None:
    """Separate or joined; what follows its values stays."""
    args = "--tp 1 data.yaml --lr=3 --flag"
    assert programs(script, "--tp {2,4}", args=args) == [
        "--tp 2 data.yaml --lr=3 --flag",
        "--tp 4 data.yaml --lr=3 --flag",
    ]
    assert programs(script, "--lr={1}", args=args) == ["--tp 1 data.yaml --lr=1 --flag"]
    assert programs(script, "--lr {1}", args=args) == ["--tp 1 data.yaml --lr 1 --flag"]


def test_an_option_that_is_not_there_comes_last(script: str) -> None:
    """Behind the program's other arguments."""
    assert programs(script, "--pp {2}", args="--tp 1") == ["--tp 1 --pp 2"]


def test_of_several_the_last_is_replaced(script: str) -> None:
    """Which is the one that counts."""
    assert programs(script, "--tp {4}", args="--tp 1 --tp 2") == ["--tp 1 --tp 4"]


def test_a_flag_is_there_or_not(script: str) -> None:
    """Whether the base command has it or not."""
    expected = ["--fast --tp 1", "--tp 1"]
    assert programs(script, "{--fast,}", args="--fast --tp 1") == expected
    assert programs(script, "{--fast,}", args="--tp 1") == ["--tp 1 --fast", "--tp 1"]


def test_arguments_change_together(script: str) -> None:
    """With braces around everything; of run and of the program alike."""
    found = points(script, "{--world-size 64 --tp 2,--world-size 128 --tp 4}", args="--tp 1")
    assert [p.arguments[-1] for p in found] == ["2", "4"]
    assert list(found[1].arguments[2:4]) == ["--world-size", "128"]
    assert found[1].arguments.count("--world-size") == 1


def test_values_may_hold_spaces_and_commas(script: str) -> None:
    """Spaces separate arguments; commas in brackets and quotes separate nothing."""
    assert programs(script, "--betas {0.9 0.95,0.8 0.9}", args="--betas 1 1 --tp 2") == [
        "--betas 0.9 0.95 --tp 2",
        "--betas 0.8 0.9 --tp 2",
    ]
    assert programs(script, "--sizes {[1,2],'3,4'}") == ["--sizes [1,2]", "--sizes 3,4"]
    assert programs(script, "--path runs/{a,b}/x") == ["--path runs/a/x", "--path runs/b/x"]


def test_negative_numbers_are_values(script: str) -> None:
    """And no options."""
    assert programs(script, "--shift {-1,-.5}", args="--shift -3") == ["--shift -1", "--shift -.5"]


def test_options_of_run_stand_before_the_program(script: str) -> None:
    """In place of the base command's, beside those that may be repeated."""
    (point,) = points(script, "--cluster {b200}")
    assert point.arguments == ("--world-size", "64", "--cluster", "b200", "--", script)
    (point,) = points(script, "--slow {3=1.5}")
    assert point.arguments[4:6] == ("--slow", "3=1.5")


def test_variables_are_set_or_not_set(script: str) -> None:
    """An empty alternative leaves a variable unset."""
    found = points(script, "NCCL_ALGO={Ring,Tree,}")
    assert [p.environment for p in found] == [
        {"NCCL_ALGO": "Ring"},
        {"NCCL_ALGO": "Tree"},
        {"NCCL_ALGO": None},
    ]


def test_what_both_know_must_be_said(script: str) -> None:
    """Whose option it is that run and the program have."""
    with pytest.raises(UsageError, match="both prismscale run and the program have --samples"):
        points(script, "--samples {1,2}", args="--samples 3")
    assert programs(script, "-- --samples {1,2}", args="--samples 3") == [
        "--samples 1",
        "--samples 2",
    ]
    (point,) = points(script, "run --samples {1}", args="--samples 3")
    assert point.arguments[4:6] == ("--samples", "1")
    assert programs(script, "-- lr={1}") == ["lr=1"]


def test_names_are_short_where_that_is_clear(script: str) -> None:
    """The last part of a dotted name, unless two would be the same; or what the user says."""
    found = points(script, "--model.tp {2}", "--data.workers {1}", "p: --pipeline.degree {8}")
    assert list(found[0].values) == ["tp", "workers", "p"]
    found = points(script, "--model.size {2}", "--data.size {1}")
    assert list(found[0].values) == ["model_size", "data_size"]


def test_equal_commands_are_one_point(script: str) -> None:
    """However they were put together."""
    assert len(points(script, "{--tp 2 --pp 1,--pp 1 --tp 2}", args="--tp 4 --pp 4")) == 1


def test_a_module_stays_behind_its_option() -> None:
    """What follows ``-m`` is the module's."""
    base = BaseCommand(
        options=OPTIONS, script=Script(target="pkg.train", args=("--tp", "1"), is_module=True)
    )
    varied = parse_all(["--tp {4}", "--samples {2}"], run_options=RUN_OPTIONS, program=())
    (point,) = points_of(base, varied)
    assert point.arguments[4:] == ("--samples", "2", "-m", "pkg.train", "--", "--tp", "4")


def test_points_have_folders_of_their_own(script: str) -> None:
    """Readable, short, and different where values are alike."""
    long = "x" * 300
    found = points(script, f"--name {{a/b,a b,{long}}}")
    names = [p.folder_name for p in found]
    assert len(set(names)) == 3
    assert all("/" not in name and len(name) < 100 for name in names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--tp {}", "the braces are empty"),
        ("--tp {2,2}", "has '2' twice"),
        ("--tp {2,}", "a value is empty"),
        ("--tp 4", "has no {…}"),
        ("--tp {2", "has no {…}"),
        ("--tp {2} --pp {4}", "has two {…}"),
        ("--name {'a}", "has no {…}"),
        ("run --tp {2}", "prismscale run has no --tp"),
    ],
)
def test_what_cannot_be_read_is_refused(script: str, text: str, says: str) -> None:
    """With the text, and what is wrong with it."""
    with pytest.raises(UsageError, match=says):
        points(script, text)


def test_the_same_option_twice_is_refused(script: str) -> None:
    """Also a variable, and a name of one's own; and a sweep over nothing."""
    with pytest.raises(UsageError, match="--tp is varied twice"):
        points(script, "--tp {2}", "--tp {4}")
    with pytest.raises(UsageError, match="A is varied twice"):
        points(script, "A={2}", "A={4}")
    with pytest.raises(UsageError, match="two --vary are called tp"):
        points(script, "tp: --a {2}", "tp: --b {4}")
    with pytest.raises(UsageError, match="nothing is varied"):
        points(script)


def test_too_many_points_are_refused(script: str) -> None:
    """Before any of them is made."""
    many = ",".join(map(str, range(200)))
    with pytest.raises(UsageError, match="allowed: 100,000"):
        points(script, f"--a {{{many}}}", f"--b {{{many}}}", f"--c {{{many}}}")
    with pytest.raises(UsageError, match="40,000 points"):
        points(script, f"--a {{{many}}}", f"--b {{{many}}}")


def test_what_is_perhaps_misspelt_is_named(script: str) -> None:
    """An option of nobody that looks like a known one; what libraries may read is let through."""
    varied = parse_all(
        ["--clustr {a,b}", "--tp {2}", "--pipeline.degree {2}"],
        run_options=RUN_OPTIONS,
        program=(),
    )
    program = Script(target=script)
    assert list(unheard_of(varied, program, RUN_OPTIONS)) == [("--clustr", "--cluster")]
