"""A program's default device and dtype, which are of no concern to what absent peers send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import prismscale
from prismscale.graph.node import CollectiveOp
from prismscale.payload.mirror import MirrorPayload
from prismscale.payload.rules.rule import ATTRIBUTE
from prismscale.payload.rules.rule_book import RuleBook
from prismscale.payload.rules.rule_file import RuleFile
from support.calls import call

USUAL = MirrorPayload()


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """A program that makes its tensors elsewhere and of another dtype, unless it says where."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("stride", [1, 2])
def test_what_the_mirror_sends_stays_the_same(other_defaults: None, stride: int) -> None:
    """Into contiguous tensors and into others."""
    expected, received = (
        torch.empty(9, stride, device="cpu", dtype=torch.float32)[:, 0] for _ in "ab"
    )
    USUAL.fill(call(5, expected, op=CollectiveOp.RECV, root=0))
    MirrorPayload().fill(call(5, received, op=CollectiveOp.RECV, root=0))
    assert torch.equal(received, expected)


@pytest.mark.parametrize("said", [2, [2, 2], "own"], ids=str)
def test_what_a_rule_says_arrives(other_defaults: None, said: Any) -> None:
    """A number, numbers, or what this rank does."""
    made = getattr(prismscale.payload_rule()(lambda told: said), ATTRIBUTE)
    tensor = torch.full((2,), 2, device="cpu", dtype=torch.float32)
    assert RuleBook([made]).offer(call(5, tensor), lambda: None)
    assert tensor.tolist() == [8.0, 8.0]


def test_token_ids_are_made_on_the_host(other_defaults: None, tmp_path: Path) -> None:
    """Inside the vocabulary."""
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nuse = "token-ids"\nvocab = 50\n')
    ids = torch.full((9,), -1, device="cpu")
    book = RuleBook(RuleFile.parse(str(path)).rules())
    assert book.offer(call(5, ids, op=CollectiveOp.BROADCAST, root=0), lambda: None)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 50
