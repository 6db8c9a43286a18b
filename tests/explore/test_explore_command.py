"""``prismscale explore`` on a program for GPUs, on a device that is not there."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from prismscale.graph.io import load_graph
from support.explored_program import NULL, TOKENS, WORLD, by_label, explored, write_explored
from support.runs import Ended, prismscale, results

VARY = ("--vary", "--tp {1,2,3}", "--vary", "gib: --eat {0,200}")
WHERE = ("--where", "gib == 0 or tp == 1")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_explored(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explored") / "sweep"


@pytest.fixture(scope="module")
def ended(out: Path, script: Path) -> Ended:
    """A sweep of four points: two that run, one that is too large, one that is refused."""
    return explore(out, script)


def explore(out: Path, script: Path, *more: str, vary: tuple[str, ...] = (*VARY, *WHERE)) -> Ended:
    return prismscale("explore", *NULL, "--out", out, *vary, *more, "--", script, "--width", 32)


def test_every_point_has_a_row(ended: Ended, out: Path) -> None:
    """Those that run, the one that does not fit, and the one that the program refuses."""
    assert ended.code == 0, ended.err
    status = {label: point["status"] for label, point in by_label(out).items()}
    assert status == {
        "tp=1 gib=0": "done",
        "tp=2 gib=0": "done",
        "tp=1 gib=200": "does not fit",
        "tp=3 gib=0": "refused",
    }
    assert explored(out)["chosen"] == {"tp": "1", "gib": "0"}


def test_a_row_is_what_run_shows(ended: Ended, out: Path, script: Path, tmp_path: Path) -> None:
    """To the nanosecond and the byte, with the command that the row names."""
    row = by_label(out)["tp=2 gib=0"]
    arguments = shlex.split(row["arguments"])
    done = prismscale("run", "--out", tmp_path / "run", *arguments)
    assert done.code == 0, done.err
    alone, explored_too = results(tmp_path / "run"), results(out / row["folder"])
    # How far a witness runs before it is recognised depends on who runs beside it.
    for name in alone.keys() - {"wall_s", "peak_rss_bytes", "payloads"}:
        assert alone[name] == explored_too[name], name
    assert row["step_ns"] == alone["step_ns"]
    assert row["reserved_bytes"] == alone["stages"][0]["reserved_bytes"]


def test_the_words_are_the_programs(ended: Ended, out: Path) -> None:
    """In the row, on the terminal, and of the allocator."""
    rows = by_label(out)
    said = f"ValueError: a world of {WORLD} has no groups of 3"
    assert rows["tp=3 gib=0"]["reason"] == said
    assert said in ended.out
    assert "Tried to allocate 200.00 GiB" in rows["tp=1 gib=200"]["reason"]
    assert rows["tp=1 gib=200"]["fits"] is False


def test_tokens_and_operations_are_found(ended: Ended, out: Path) -> None:
    """Ranks of one tensor-parallel group train on the same tokens."""
    rows = by_label(out)
    one, two = rows["tp=1 gib=0"], rows["tp=2 gib=0"]
    assert one["tokens_per_step"] == WORLD * TOKENS
    assert two["tokens_per_step"] == WORLD // 2 * TOKENS
    assert one["tokens_per_s"] == pytest.approx(one["tokens_per_step"] / one["p50_ns"] * 1e9)
    # Two products forward, each twice as much backward; float32 without tensor cores.
    flops = 3 * WORLD * TOKENS * 2 * (32 * 128 + 128 * 1000)
    assert one["mfu"] == pytest.approx(flops / (WORLD * 66.9e12 * one["p50_ns"] / 1e9))


def test_the_table_has_the_same_figures(ended: Ended, out: Path) -> None:
    """As CSV, with the varied names first."""
    with (out / "explore.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:2] == ["tp", "gib"]
    found = explored(out)["points"]
    assert [row["step_ns"] for row in rows] == [str(p["step_ns"] or "") for p in found]
    assert [row["status"] for row in rows] == [p["status"] for p in found]


def test_the_terminal_needs_80_columns(ended: Ended) -> None:
    """But for paths and the program's words, which are not broken."""
    lines = ended.out.splitlines()
    head = next(i for i, line in enumerate(lines) if "tok/s" in line)
    assert all(len(line.rstrip()) <= 80 for line in lines[head : head + 5])


def test_finished_points_are_not_run_again(ended: Ended, out: Path, script: Path) -> None:
    """Nor refused ones; the tables are written anew, with the same bytes."""
    before = {p: p.stat().st_mtime_ns for p in out.glob("points/*/results.json")}
    table = (out / "explore.json").read_bytes()
    (out / "explore.json").unlink()
    for log in out.glob("logs/*"):
        log.unlink()
    again = explore(out, script)
    assert again.code == 0, again.err
    assert {p: p.stat().st_mtime_ns for p in out.glob("points/*/results.json")} == before
    assert not list(out.glob("logs/*"))
    assert (out / "explore.json").read_bytes() == table


def test_what_failed_is_run_again_if_asked(ended: Ended, out: Path, script: Path) -> None:
    """And nothing else."""
    only = ("--vary", "--tp {1,3}", "--vary", "gib: --eat {0}")
    for log in out.glob("logs/*"):
        log.unlink()
    assert explore(out, script, "--retry", vary=only).code == 0
    assert {log.name.partition("-gib")[0] for log in out.glob("logs/tp*")} == {"tp=3"}


def test_another_program_is_another_point(ended: Ended, out: Path, tmp_path: Path) -> None:
    """Its files are part of what a row stands for: a changed one is run again."""
    script = write_explored(tmp_path)
    only = ("--vary", "--tp {1}")
    assert explore(tmp_path / "out", script, vary=only).code == 0
    (first,) = explored(tmp_path / "out")["points"]
    script.write_text(script.read_text().replace("4 * width", "8 * width"))
    assert explore(tmp_path / "out", script, vary=only).code == 0
    (second,) = explored(tmp_path / "out")["points"]
    assert second["mfu"] > first["mfu"]


def test_a_point_finds_its_environment(script: Path, tmp_path: Path) -> None:
    """The program reads a variable, which no other point has; what it cannot use is in its row."""
    vary = ("--vary", "RATE={2,fast}")
    assert explore(tmp_path / "out", script, vary=vary).code == 0
    rows = by_label(tmp_path / "out")
    assert rows["RATE=2"]["status"] == "done"
    assert "could not convert string to float: 'fast'" in rows["RATE=fast"]["reason"]


def test_an_option_of_nobody_is_in_the_row(script: Path, tmp_path: Path) -> None:
    """As the program says it; a sweep without any figures fails."""
    done = explore(tmp_path / "out", script, vary=("--vary", "--tpp {1,2}"))
    assert done.code == 3
    for row in explored(tmp_path / "out")["points"]:
        assert row["reason"].endswith(f"unrecognized arguments: --tpp {row['values']['tpp']}")
    assert "No point fits and has figures" in done.out


def test_what_run_refuses_everywhere_is_refused_at_once(script: Path, tmp_path: Path) -> None:
    """Before anything is started; what it refuses at one point is in the row of that point."""
    done = explore(tmp_path / "out", script, "--cluster", "nowhere", vary=("--vary", "--tp {1}"))
    assert done.code == 2
    assert "unknown cluster 'nowhere'" in done.err
    assert not list((tmp_path / "out" / "points").iterdir())
    vary = ("--vary", "--world-size {4,0}")
    assert explore(tmp_path / "out", script, vary=vary).code == 0
    assert "--world-size is missing" in by_label(tmp_path / "out")["world_size=0"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--vary", "--tp {}"), "the braces are empty"),
        (("--vary", "--tp {1}", "--where", "pp < 2"), "knows no 'pp'"),
        (("--vary", "--tp {1}", "--where", "tp > 2"), "holds for none of 1 combinations"),
        (("--vary", "--tp {1}", "--draws", "0"), "--draws is 0"),
        (("--vary", "--tp {1}", "--tokens-per-step", "-1"), "--tokens-per-step is -1"),
        (("--vary", "--tp {1}", "--workers", "0"), "--workers is 0"),
        (("--vary", "--tp {1}", "--executor", "cloud"), "unknown executor 'cloud'"),
        ((), "nothing is varied"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    script: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """With the option, what was given, and what is allowed."""
    done = explore(tmp_path / "out", script, vary=arguments)
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "out" / "points").exists()


def test_a_folder_of_something_else_is_left_alone(script: Path, tmp_path: Path) -> None:
    """It may hold what somebody needs."""
    (tmp_path / "thesis.txt").write_text("…")
    done = explore(tmp_path, script, vary=("--vary", "--tp {1}"))
    assert done.code == 2
    assert "holds files that are not a sweep's" in done.err


def test_given_tokens_go_before_found_ones(ended: Ended, out: Path, script: Path) -> None:
    """They are of the whole job."""
    only = ("--vary", "--tp {1}", "--vary", "gib: --eat {0}")
    assert explore(out, script, "--tokens-per-step", "1000000", vary=only).code == 0
    (row,) = explored(out)["points"]
    assert row["tokens_per_step"] == 1_000_000


def test_ranks_of_a_point_are_there_to_be_read(ended: Ended, out: Path) -> None:
    """Its folder is a run folder like any other."""
    row = by_label(out)["tp=1 gib=0"]
    assert load_graph(out / row["folder"] / "graph").world_size == WORLD
    assert (out / row["folder"] / "report.html").is_file()
