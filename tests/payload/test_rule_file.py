"""Files of rules: Python that ranks execute, TOML, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import FormatError, PrismscaleError, UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.rules.rule import Communication
from prismscale.payload.rules.rule_book import RuleBook
from prismscale.payload.rules.rule_file import RuleFile
from prismscale.payload.rules.shipped import SHIPPED
from support.calls import call

PYTHON = """
import prismscale

@prismscale.payload_rule(op="all_reduce", group="tp")
def flags(told):
    return 0

alias = flags

@prismscale.payload_rule(op=["broadcast", "recv"], dtype="int64", name="ids")
def second(told, peer):
    return peer
"""


def written(folder: Path, text: str, name: str = "rules.toml") -> RuleFile:
    """A file with that in it."""
    path = folder / name
    path.write_text(text)
    return RuleFile.parse(str(path))


def test_functions_of_a_python_file_are_rules(tmp_path: Path) -> None:
    """In their order, each once, with the line at which they begin."""
    first, second = written(tmp_path, PYTHON, "rules.py").rules()
    assert (first.name, first.where, first.is_per_peer) == ("flags", "rules.py:4", False)
    assert (second.name, second.match.op, second.is_per_peer) == (
        "ids",
        ("broadcast", "recv"),
        True,
    )


def test_a_python_file_is_not_executed_before_a_rank_runs(tmp_path: Path) -> None:
    """Looking at it compiles it only."""
    text = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    file = written(tmp_path, text, "rules.py")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UsageError, match=r"rules.py has no rules; give FILE.py"):
        file.rules()
    assert (tmp_path / "ran").exists()


def test_toml_says_what_a_peer_contributes(tmp_path: Path) -> None:
    """A number, numbers, or what this rank does."""
    text = """
    [[rule]]
    name = "status"
    op = "broadcast"
    group = "tp"
    dtype = ["int32", "int64"]
    value = [1, 0]
    [[rule]]
    op = ["all_reduce"]
    value = "own"
    """
    first, second = written(tmp_path, text).rules()
    assert (first.name, first.match.dtype) == ("status", ("int32", "int64"))
    assert second.name == "rule 2"
    told = Communication(op="broadcast", group="mesh_tp", ranks=(0, 1), group_rank=1)
    assert [rule.contribute(told, 0) for rule in (first, second)] == [[1, 0], "own"]


def answered(file: RuleFile, *calls: Collective) -> RuleBook:
    """What its rules make of some communications."""
    book = RuleBook(file.rules())
    for collective in calls:
        assert book.offer(collective, lambda: None)
    return book


def test_own_in_toml_is_own_for_objects_too(tmp_path: Path) -> None:
    """Each peer gathers what this rank does, and no text."""
    op = "all_gather_object"
    (rule,) = written(tmp_path, f"[[rule]]\nop = {op!r}\nvalue = 'own'\n").rules()
    group = GroupHandle(group_index=0, ranks=(0, 1, 2), group_rank=1, name="", backend="gloo")
    found = RuleBook([rule]).objects(op, group, [{"mine": 1}])
    assert found is not None
    assert found.objects == [{"mine": 1}] * 3


def test_token_ids_are_inside_the_vocabulary(tmp_path: Path) -> None:
    """Others each time, the same on every rank that receives them."""
    file = written(tmp_path, '[[rule]]\nuse = "token-ids"\nvocab = 50\n')
    seen = [torch.empty(40, 25, dtype=torch.int64) for _ in range(4)]
    for rank, first, second in ((5, *seen[:2]), (7, *seen[2:])):
        calls = (call(rank, t, op=CollectiveOp.BROADCAST, root=0) for t in (first, second))
        answered(file, *calls)
    assert all(int(t.min()) >= 0 and int(t.max()) < 50 for t in seen)
    assert len(seen[0].unique()) == 50
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


FLAG = torch.ones(1)
ANSWERS: dict[str, tuple[Collective, list[float]]] = {
    "data-loader-status": (
        call(5, torch.zeros(3, dtype=torch.int32), op=CollectiveOp.BROADCAST, root=0),
        [1, 1, 1],
    ),
    "gradient-norm": (call(5, torch.tensor([2.0])), [8.0]),
    "moe-gating": (call(5, torch.tensor([1, 2, 3, 4]), op=CollectiveOp.ALL_TO_ALL), [0, 2, 0, 0]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_shipped_rules_say_what_programs_send(name: str, tmp_path: Path) -> None:
    """Of four ranks, with nothing but the rule's name in the file."""
    collective, expected = ANSWERS[name]
    collective.outputs = tuple(t.clone() for t in collective.outputs)
    if collective.op is CollectiveOp.ALL_REDUCE:
        collective.inputs = collective.outputs
    answered(written(tmp_path, f'[[rule]]\nuse = "{name}"\n'), collective)
    assert collective.outputs[0].tolist() == expected


def test_every_shipped_rule_can_be_used(tmp_path: Path) -> None:
    """With what it must be told."""
    needs = {"vocab": "vocab = 9\n"}
    for name, shipped in SHIPPED.items():
        must = [needs[key] for key, value in shipped.parameters.items() if value is None]
        (rule,) = written(tmp_path, f'[[rule]]\nuse = "{name}"\n' + "".join(must)).rules()
        assert rule.name == name
        assert shipped.what


TOML: list[tuple[str, type[PrismscaleError], str]] = [
    ("[[rule]\n", FormatError, "rules.toml: not valid TOML"),
    ("", UsageError, "rules.toml has no rules"),
    ("[rules]\nop = 1\n", FormatError, r"unknown key 'rules'; each rule is a table \[\[rule\]\]"),
    ("rule = 3\n", FormatError, r"'rule' is no list of tables"),
    ("[[rule]]\nop = 'broadcast'\n", FormatError, "rule 1: key 'value' is missing"),
    ("[[rule]]\nop = 'brodcast'\nvalue = 1\n", FormatError, "rule 1: op 'brodcast' .* broadcast"),
    ("[[rule]]\nvalue = 1\ngruop = 'tp'\n", FormatError, "unknown key 'gruop'; .*mean group"),
    ("[[rule]]\nvalue = 'zero'\n", FormatError, "value = 'zero'; allowed: a number"),
    ("[[rule]]\nvalue = []\n", FormatError, r"value = \[\]; allowed: a number"),
    ("[[rule]]\nvalue = 1\nnumel = 'two'\n", FormatError, "'numel' is 'two'; expected a whole"),
    ("[[rule]]\nuse = 'token-id'\n", FormatError, "use = 'token-id'; .* did you mean token-ids"),
    ("[[rule]]\nuse = 'token-ids'\n", FormatError, "key 'vocab' is missing"),
    ("[[rule]]\nuse = 'token-ids'\nvocab = 0\n", FormatError, "vocab is 0; give the size"),
    ("[[rule]]\nuse = 'token-ids'\nvocab = inf\n", FormatError, "vocab is inf; give the size"),
    ("[[rule]]\nuse = 'token-ids'\nvocab = 'own'\n", FormatError, "vocab is 'own'; give the size"),
    ("[[rule]]\nuse = 'token-ids'\nvocab = [9]\n", FormatError, "a whole number from 1"),
    (2 * "[[rule]]\nuse = 'found-inf'\n", UsageError, "two rules have the name 'found-inf'"),
]


@pytest.mark.parametrize(("text", "error", "message"), TOML)
def test_wrong_toml_is_refused(
    tmp_path: Path, text: str, error: type[PrismscaleError], message: str
) -> None:
    """Before anything runs, with the rule's number."""
    with pytest.raises(error, match=message):
        written(tmp_path, text)


def test_python_that_is_none_is_refused(tmp_path: Path) -> None:
    """Before anything runs, with the line."""
    with pytest.raises(UsageError, match=r"rules.py:2: not valid Python"):
        written(tmp_path, "import torch\ndef (\n", "rules.py")


@pytest.mark.parametrize("name", ["none.py", "none.toml"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    """With what may be given."""
    with pytest.raises(UsageError, match=r"there is no such file; give FILE.py"):
        RuleFile.parse(str(tmp_path / name))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(UsageError, match="neither Python nor TOML"):
        written(tmp_path, "", "rules.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere\n", "rules.py: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "rules.py: SystemExit: 3"),
        (
            "import prismscale\n@prismscale.payload_rule(op='gahter')\ndef f(told): ...\n",
            "op 'gahter'",
        ),
    ],
)
def test_python_that_fails_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """When a rank executes it."""
    file = written(tmp_path, text, "rules.py")
    with pytest.raises(UsageError, match=message):
        file.rules()


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    """So that captures of other rules are not used again."""
    before = written(tmp_path, '[[rule]]\nuse = "found-inf"\n').digest
    again: Any = written(tmp_path, '[[rule]]\nuse = "found-inf"\nvalue = 1\n').digest
    assert before != again
