"""Rules for object collectives, and rules for tensors while one is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

import prismscale
from prismscale.errors import UsageError
from prismscale.payload.chain import RankPayload
from prismscale.payload.mirror import MirrorPayload
from prismscale.payload.objects import MIRROR
from prismscale.payload.rules.rule import ATTRIBUTE, Match, Rule
from prismscale.payload.rules.rule_book import RuleBook
from support.emulation import emulated


def rule(function: Callable[..., Any], **match: Any) -> Rule:
    """As a file of rules makes it."""
    made: Rule = getattr(prismscale.payload_rule(**match)(function), ATTRIBUTE)
    return made


def payload(*rules: Rule) -> RankPayload:
    """Rules before the mirror."""
    return RankPayload(rules=RuleBook(rules), recorded=None, mirror=MirrorPayload())


def ruled(*rules: Rule) -> RuleBook:
    """Rules that object collectives follow until the rank ends."""
    MIRROR.rules = book = RuleBook(rules)
    return book


def test_objects_are_what_a_rule_says() -> None:
    """Of the root, and of every peer; this rank's own stays."""
    sent = rule(lambda told: [told.site.rpartition(":")[0], told.root], op="broadcast_object_list")
    gathered = rule(lambda told, peer: f"from {peer}", op="all_gather_object", name="gathered")
    with emulated(1, 3):
        book = ruled(sent, gathered)
        objects: list[Any] = [None, None]
        dist.broadcast_object_list(objects, src=2)
        everybody: list[Any] = [None] * 3
        dist.all_gather_object(everybody, {"mine": 1})
    assert objects[0].endswith("test_rules_for_objects.py")
    assert objects[1] == 2
    assert everybody == ["from 0", {"mine": 1}, "from 2"]
    assert sorted(book.answered.values()) == [1, 1]


@pytest.mark.parametrize("op", ["broadcast_object_list", "all_gather_object"])
def test_a_rule_for_objects_may_say_nothing(op: str) -> None:
    """Then it has not answered, and the objects are this rank's own."""
    with emulated(1, 3):
        book = ruled(rule(lambda told: None, op=op))
        objects: list[Any] = ["mine"] * 3
        if op == "all_gather_object":
            dist.all_gather_object(objects, "mine")
        else:
            dist.broadcast_object_list(objects, src=0)
    assert objects == ["mine"] * 3
    assert book.answered.total() == 0


def test_the_root_of_objects_asks_no_rule() -> None:
    """It has them."""
    with emulated(0, 3):
        book = ruled(rule(lambda told: ["other"], op="broadcast_object_list"))
        objects = ["mine"]
        dist.broadcast_object_list(objects, src=0)
    assert objects == ["mine"]
    assert not book.answered


def test_objects_that_do_not_fit_are_refused() -> None:
    """As many as the program makes room for."""
    with emulated(1, 3):
        ruled(rule(lambda told: ["one"], op="broadcast_object_list"))
        with pytest.raises(UsageError, match="is to give a list of 2 objects"):
            dist.broadcast_object_list([None, None], src=0)


def test_rules_for_tensors_leave_objects_alone() -> None:
    """Their bytes and lengths are no tensors of the program's."""
    sources = payload(rule(lambda told: 7))
    with emulated(1, 3, payload=sources):
        objects = [{"epoch": 3}]
        dist.broadcast_object_list(objects, src=0)
    assert objects == [{"epoch": 3}]
    assert sources.rules.answered.total() == 0


SENT: dict[str, Callable[[], object]] = {
    "broadcast_object_list": lambda: dist.broadcast_object_list([None], src=0),
    "broadcast": lambda: dist.broadcast(torch.zeros(1), src=0),
}


@pytest.mark.parametrize("op", SENT)
def test_a_value_that_must_be_recorded_is_asked_for(op: str) -> None:
    """Nobody sent it where no other rank was captured."""
    match = Match(op=(op,))
    strict = Rule(
        name="strict",
        where="rules.toml",
        match=match,
        contribute=lambda told, peer: None,
        is_recorded=True,
    )
    with emulated(1, 3, payload=payload(strict)):
        ruled(strict)
        with pytest.raises(UsageError, match=r"'strict' \(rules.toml\) wants a recorded value"):
            SENT[op]()
