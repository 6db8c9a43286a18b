"""Rules for payloads: which communications they are for, and what they leave on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode

import prismscale
from prismscale.analysis.payload_use import PayloadKind
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.chain import RankPayload
from prismscale.payload.mirror import MirrorPayload
from prismscale.payload.rules.rule import ATTRIBUTE, Communication, Match, Rule
from prismscale.payload.rules.rule_book import RuleBook
from prismscale.payload.rules.values import OWN
from support.emulation import emulated

SIZE = 4


def rule(function: Callable[..., Any], **match: Any) -> Rule:
    """As a file of rules makes it."""
    made: Rule = getattr(prismscale.payload_rule(**match)(function), ATTRIBUTE)
    return made


def call(
    op: CollectiveOp,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    rank: int = 1,
    root: int = -1,
    reduce_op: Any = None,
    output_splits: Sequence[int] = (),
) -> Collective:
    """Of four ranks, seen by one of them."""
    group = GroupHandle(
        group_index=1, ranks=(8, 9, 10, 11), group_rank=rank, name="mesh_tp", backend="gloo"
    )
    return Collective(
        op=op,
        group=group,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        n_bytes=0,
        root=root,
        reduce_op=reduce_op,
        output_splits=output_splits,
        site="package/data.py:120",
    )


def fill(collective: Collective, *rules: Rule, here: dict[int, list[Tensor]] | None = None) -> bool:
    """Whether a rule answered."""

    def otherwise() -> None:
        raise AssertionError("values are known here")

    return RuleBook(rules).offer(collective, otherwise, here=here)


def received(told: Communication, peer: int) -> int:
    """Another number for each peer."""
    return peer + 1


PLACES = {
    "data.py": True,
    "data.py:120": True,
    "data.py:12": False,
    "package/data.py": True,
    "age/data.py": False,
    "*.py:120": True,
    "other.py": False,
}


@pytest.mark.parametrize("site", PLACES)
def test_a_site_is_the_end_of_a_path(site: str) -> None:
    """With or without a line."""
    assert Match(site=site).covers_site("package/data.py:120") == PLACES[site]


MATCHES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"op": "all_reduce"}, True),
    ({"op": ("broadcast", "all_reduce")}, True),
    ({"op": "broadcast"}, False),
    ({"group": "tp"}, True),
    ({"group": "mesh_*"}, True),
    ({"group": "dp"}, False),
    ({"dtype": "float32"}, True),
    ({"dtype": ("int64", "int32")}, False),
    ({"numel": 3}, True),
    ({"numel": 4}, False),
    ({"max_numel": 2}, False),
    ({"reduce": "max"}, True),
    ({"reduce": "sum"}, False),
    ({"site": "data.py", "group": "t?"}, True),
    ({"site": "data.py:7"}, False),
]


@pytest.mark.parametrize(("match", "is_meant"), MATCHES, ids=str)
def test_everything_that_is_given_must_hold(match: dict[str, Any], is_meant: bool) -> None:
    """Of operation, group, dtype, elements, reduction and place."""
    tensor = torch.ones(3)
    collective = call(CollectiveOp.ALL_REDUCE, [tensor], [tensor], reduce_op=ReduceOp.MAX)
    assert fill(collective, rule(lambda told: 5, **match)) == is_meant
    assert tensor.tolist() == ([5.0] * 3 if is_meant else [1.0] * 3)


def test_a_rule_for_any_operation_is_for_none_on_objects() -> None:
    """These want objects and no tensors."""
    assert not Match().covers_call("all_gather_object", "tp")
    assert Match(op=("all_gather_object",)).covers_call("all_gather_object", "tp")


REDUCTIONS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


@given(
    kind=st.sampled_from(list(REDUCTIONS)),
    rank=st.integers(0, SIZE - 1),
    here=st.sets(st.integers(0, SIZE - 1)),
)
def test_a_reduction_is_that_of_what_everybody_says(kind: Any, rank: int, here: set[int]) -> None:
    """This rank and those that are here by what they have, absent ones by the rule."""
    mine = torch.tensor([2.0, 7.0])
    present = {m: [torch.tensor([3.0, 1.0])] for m in here if m != rank}
    everybody = [torch.full((2,), float(m + 1)) for m in range(SIZE)]
    everybody[rank] = mine.clone()
    for member in present:
        everybody[member] = present[member][0]
    collective = call(CollectiveOp.ALL_REDUCE, [mine], [mine], rank=rank, reduce_op=kind)
    is_needed = len(present) < SIZE - 1
    answered = fill(collective, rule(received), here={**present, rank: [mine]})
    assert answered == is_needed
    if is_needed:
        assert torch.equal(mine, reduce(REDUCTIONS[kind], everybody))


def test_a_scattered_reduction_is_of_this_ranks_part() -> None:
    """A peer is asked for as much as arrives."""
    inputs, output = torch.arange(8.0), torch.empty(2)
    fill(call(CollectiveOp.REDUCE_SCATTER, [inputs], [output]), rule(received))
    assert output.tolist() == [2 + 1 + 3 + 4, 3 + 1 + 3 + 4]


def test_a_gather_holds_what_each_peer_says() -> None:
    """And this rank's own in its place."""
    output = torch.empty(8)
    fill(call(CollectiveOp.ALL_GATHER, [torch.tensor([7.0, 8.0])], [output]), rule(received))
    assert output.tolist() == [1, 1, 7, 8, 3, 3, 4, 4]


@pytest.mark.parametrize("said", [received, lambda told, peer: OWN], ids=["number", "own"])
def test_an_uneven_gather_holds_as_much_as_each_peer_has_room_for(said: Any) -> None:
    """This rank's own is cut, or filled with zeros."""
    outputs = [torch.empty(n) for n in (1, 2, 3, 2)]
    assert fill(call(CollectiveOp.ALL_GATHER, [torch.tensor([7.0, 8.0])], outputs), rule(said))
    own = [[7.0], [7.0, 8.0], [7.0, 8.0, 0.0], [7.0, 8.0]]
    numbers = [[1.0], [7.0, 8.0], [3.0, 3.0, 3.0], [4.0, 4.0]]
    assert [t.tolist() for t in outputs] == (numbers if said is received else own)


def test_an_exchange_holds_as_many_rows_as_arrive() -> None:
    """From each peer as many as the program has room for."""
    output = torch.empty(6, 1)
    collective = call(
        CollectiveOp.ALL_TO_ALL,
        [torch.arange(4.0).view(4, 1)],
        [output],
        output_splits=(0, 1, 2, 3),
    )
    fill(collective, rule(received))
    assert output.flatten().tolist() == [1, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("op", [CollectiveOp.BROADCAST, CollectiveOp.RECV, CollectiveOp.SCATTER])
def test_what_one_sends_arrives(op: CollectiveOp) -> None:
    """The rule is asked for that one alone."""
    output = torch.zeros(2, 3, dtype=torch.int64)
    inputs = [output] if op is CollectiveOp.BROADCAST else []
    assert fill(call(op, inputs, [output], root=3), rule(received))
    assert torch.equal(output, torch.full((2, 3), 4))


def test_a_rank_that_sends_asks_no_rule() -> None:
    """Nothing arrives there."""
    tensor = torch.ones(2)
    mine = call(CollectiveOp.BROADCAST, [tensor], [tensor], root=1)
    sent = call(CollectiveOp.SEND, [tensor], [], root=2)
    reduced_elsewhere = call(CollectiveOp.REDUCE, [tensor], [tensor], root=2)
    assert not any(fill(c, rule(received)) for c in (mine, sent, reduced_elsewhere))


def test_a_peer_may_contribute_what_this_rank_does() -> None:
    """As the mirror has it, for one kind of communication."""
    tensor = torch.tensor([3.0])
    fill(call(CollectiveOp.ALL_REDUCE, [tensor], [tensor]), rule(lambda told: OWN))
    assert tensor.item() == 12.0


def test_what_this_rank_contributes_is_copied_once() -> None:
    """Not once for each peer: they would all be held at a time."""
    tensor = torch.ones(1000)
    with CountedClones() as counted:
        fill(call(CollectiveOp.ALL_REDUCE, [tensor], [tensor]), rule(lambda told: OWN))
    assert counted.clones == 1
    assert tensor.tolist() == [4.0] * 1000


class CountedClones(TorchDispatchMode):
    """Counts copies of tensors."""

    clones = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.clones += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_rule_may_say_nothing() -> None:
    """Then other sources are asked, and it does not count."""
    tensor = torch.ones(2)
    assert not fill(
        call(CollectiveOp.ALL_REDUCE, [tensor], [tensor]), rule(lambda told, peer: None)
    )
    assert tensor.tolist() == [1.0, 1.0]


def test_a_rule_is_told_what_it_answers() -> None:
    """And how often it has answered."""
    seen: list[Communication] = []
    tensor = torch.ones(2)
    book = RuleBook([rule(lambda told: seen.append(told) or 1)])
    for _ in range(2):
        collective = call(CollectiveOp.ALL_REDUCE, [tensor], [tensor])
        assert book.offer(collective, lambda: None)
    first, second = seen
    assert (first.op, first.group, first.ranks, first.group_rank) == (
        "all_reduce",
        "mesh_tp",
        (8, 9, 10, 11),
        1,
    )
    assert first.site == "package/data.py:120"
    assert (first.number, second.number) == (0, 1)


def test_two_rules_for_one_communication_are_refused() -> None:
    """By name, with the place; each alone is not."""
    tensor = torch.ones(1)
    collective = call(CollectiveOp.ALL_REDUCE, [tensor], [tensor])
    first, second = rule(lambda told: 0, name="a"), rule(lambda told: 0, group="tp", name="b")
    with pytest.raises(UsageError, match=r"'a' \(.*\) and 'b' \(.*\) are both for all_reduce") as e:
        fill(collective, first, second)
    assert "package/data.py:120" in str(e.value)
    elsewhere = rule(lambda told: 0, site="data.py:1", name="c")
    assert fill(collective, first, elsewhere)


def fails(told: Communication) -> int:
    """Divides by nothing."""
    return 1 // 0


WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda told: torch.ones(3), r"gives \[3\] elements .* a peer contributes \[2\]"),
    (lambda told: [1, 2, 3], r"gives \[3\] elements"),
    (lambda told: "half", "gives str .* it may give a number"),
    (lambda told: {}, "gives dict"),
    (lambda told: [torch.ones(2), torch.ones(2)], r"gives \[2, 2\] elements"),
    (fails, r"failed for all_reduce at package/data.py:120: ZeroDivisionError"),
]


@pytest.mark.parametrize(("function", "message"), WRONG)
def test_what_does_not_fit_is_refused(function: Callable[..., Any], message: str) -> None:
    """With the rule's name."""
    tensor = torch.ones(2)
    with pytest.raises(UsageError, match=message):
        fill(call(CollectiveOp.ALL_REDUCE, [tensor], [tensor]), rule(function))


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ({"op": "all_redcue"}, r"op 'all_redcue' .* did you mean all_reduce\?"),
        ({"op": "send"}, "op 'send' is no communication in which something arrives"),
        ({"dtype": "int"}, None),
        ({"dtype": "integer"}, "dtype 'integer' is none of torch's"),
        ({"reduce": "mean"}, "reduce 'mean'; allowed: avg"),
        ({"numel": -1}, "give 1 or more"),
    ],
)
def test_what_cannot_be_matched_is_refused(match: dict[str, Any], message: str | None) -> None:
    """When the rule is made."""
    if message is None:
        assert rule(lambda told: 0, **match)
        return
    with pytest.raises(UsageError, match=message):
        rule(lambda told: 0, **match)


def test_a_rule_takes_one_or_two_arguments() -> None:
    """What is told, and the peer."""
    with pytest.raises(UsageError, match="takes 3 arguments; it is given"):
        rule(lambda told, peer, more: 0)


def payload(*rules: Rule) -> RankPayload:
    """Rules before the mirror."""
    return RankPayload(rules=RuleBook(rules), recorded=None, mirror=MirrorPayload())


def test_each_source_counts_what_it_answered() -> None:
    """Rules by name, also those that were for nothing."""
    sources = payload(rule(lambda told: 9, reduce="max", name="flag"), rule(received, op="gather"))
    with emulated(0, 4, payload=sources):
        flag, norm = torch.zeros(1), torch.ones(1)
        dist.all_reduce(flag, op=ReduceOp.MAX)
        dist.all_reduce(norm)
        dist.barrier()
    assert (flag.item(), norm.item()) == (9.0, 4.0)
    uses = [(use.kind, use.name, use.communications) for use in sources.uses().uses]
    assert uses == [
        (PayloadKind.RULES, "flag", 1),
        (PayloadKind.RULES, "received", 0),
        (PayloadKind.MIRROR, "", 1),
    ]
