"""``prismscale run --rules``: what absent peers send is what the user says."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import FEW, prismscale, results, write_program

PROGRAM = """
import torch
import torch.distributed as dist

from marker import step_ends

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(50):
    more = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(more, 0)
    largest = torch.tensor([float(rank)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    print("heard", more.item(), largest.item(), flush=True)
    step_ends()
"""
RULES = """
import prismscale


@prismscale.payload_rule(op="broadcast", site="train.py")
def there_is_more(told):
    return 7


@prismscale.payload_rule(op="all_reduce", reduce="max")
def largest(told, peer):
    return told.ranks[peer]
"""


def run(folder: Path, rules: str, *options: str, name: str = "rules.py") -> tuple[int, str, str]:
    """The job of four ranks, the last one live."""
    (folder / name).write_text(rules)
    program = write_program(folder, PROGRAM)
    done = prismscale(
        *("run", "--world-size", 4, "--cluster", "loopback-gloo", "--live", 3, *FEW),
        *("--out", folder / "run", *options, "--rules", folder / name, program),
    )
    return done.code, done.out, done.err


def test_captured_and_live_ranks_hear_what_rules_say(tmp_path: Path) -> None:
    """Each rule has a line in the report, and a count in the results."""
    code, out, err = run(tmp_path, RULES)
    assert code == 0, err
    assert "[rank 3] heard 7 3.0" in out
    assert "rule 'there_is_more' (rules.py:5)" in " ".join(out.split())
    found = results(tmp_path / "run")
    assert found["payload"] == "rules"
    uses = {use["name"]: use["communications"] for use in found["payloads"] if use["name"]}
    assert set(uses) == {"there_is_more", "largest"}
    # The root of the broadcasts asks nobody.
    assert 0 < uses["there_is_more"] < uses["largest"]


def test_a_rule_that_is_for_nothing_is_an_error(tmp_path: Path) -> None:
    """After the ranks were captured, by name."""
    idle = "[[rule]]\nname = 'typo'\ngroup = 'tensor'\nvalue = 1\n"
    code, _, err = run(tmp_path, idle, name="rules.toml")
    assert code == 2
    assert "rule 'typo' (rules.toml) matches no communication" in err


def test_two_rules_for_the_same_are_an_error(tmp_path: Path) -> None:
    """Which two, and where."""
    both = "[[rule]]\nname = 'any'\nvalue = 1\n[[rule]]\nuse = 'data-loader-status'\n"
    code, _, err = run(tmp_path, both, name="rules.toml")
    assert code == 2
    assert "'any' (rules.toml) and 'data-loader-status' (rules.toml) are both for broadcast" in err
    assert "train.py:11" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--payload", "mirror"), "--payload mirror asks no rules"),
        (("--payload", "zeros"), "--payload 'zeros'; allowed: mirror, recorded, rules"),
        (("--values", "real"), "--rules is about ranks that are not there"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    """Before anything runs."""
    code, _, err = run(tmp_path, RULES, *options)
    assert code == 2
    assert message in err


def test_rules_are_asked_for_where_there_are_none(tmp_path: Path) -> None:
    """By ``--payload rules``."""
    program = write_program(tmp_path, PROGRAM)
    done = prismscale("run", "--world-size", 4, "--payload", "rules", program)
    assert (done.code, "give the rules too, --rules FILE" in done.err) == (2, True)


def test_the_mirror_alone_is_warned_of(tmp_path: Path) -> None:
    """A program that decides by what it hears may go another way."""
    program = write_program(tmp_path, PROGRAM)
    done = prismscale(
        *("run", "--world-size", 4, "--cluster", "loopback-gloo", *FEW, "--payload", "mirror"),
        *("--out", tmp_path / "run", program),
    )
    assert done.code == 0, done.err
    assert "With --payload mirror a rank hears itself" in " ".join(done.out.split())
    assert {use["kind"] for use in results(tmp_path / "run")["payloads"]} == {"mirror"}
