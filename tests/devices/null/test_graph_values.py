"""What is known of the values that a CUDA graph writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from prismscale.devices.null import value_policy
from support.cuda_graphs import capture
from support.emulation import emulated

TOKENS, EXPERTS, RANKS = 512, 8, 4


@pytest.fixture(autouse=True)
def on_the_default_stream() -> None:
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_what_is_made_of_inputs_is_known_while_they_are_what_they_were() -> None:
    """The capture ran nothing; what a graph only reads stays known."""
    source, target = torch.full((4,), 3.0, device="cuda"), torch.zeros(4, device="cuda")
    graph = capture(lambda: target.add_(source))
    assert target.tolist() == [0.0] * 4
    graph.replay()
    assert target.tolist() == [3.0] * 4
    graph.replay()
    assert value_policy.known(target) is None
    assert value_policy.known(source) is not None
    target.zero_()
    graph.replay()
    assert target.tolist() == [3.0] * 4


def test_a_flag_that_a_graph_never_raises_stays_down() -> None:
    """An overflow, say, that is kept from one replay to the next until the host asks."""
    flag, counter = torch.zeros(1, dtype=torch.bool, device="cuda"), torch.zeros(1, device="cuda")

    def program() -> None:
        counter.add_(1)
        flag.logical_or_(torch.full((1,), 5, device="cuda") > 8)

    graph = capture(program)
    for _ in range(3):
        graph.replay()
        assert not flag.item()
    assert value_policy.known(counter) is None


def test_what_is_made_of_constants_is_known_after_each_replay() -> None:
    """Also where the program has written to it since."""
    target = torch.zeros(4, dtype=torch.int64, device="cuda")

    def program() -> None:
        target.copy_(torch.arange(4, device="cuda") * 2)

    graph = capture(program)
    for _ in range(2):
        target.fill_(7)
        graph.replay()
        assert target.tolist() == [0, 2, 4, 6]


def test_what_was_known_before_is_no_constant_of_the_graph() -> None:
    """A static input may hold another batch at a replay than it held when it was captured."""
    static, found = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = capture(lambda: found.copy_(static * 2))
    static.fill_(4)
    graph.replay()
    assert value_policy.known(found) is None


def test_a_rest_that_a_graph_does_not_write_is_no_constant() -> None:
    """The first half is; it is known with the second or not at all."""
    target = torch.zeros(4, device="cuda")
    graph = capture(lambda: target[:2].fill_(1))
    graph.replay()
    assert target.tolist() == [1.0, 1.0, 0.0, 0.0]
    target.fill_(7)
    graph.replay()
    assert value_policy.known(target) is None


def marked(logits: torch.Tensor) -> torch.Tensor:
    """The map of routes, as megatron-core makes it."""
    _, chosen = torch.topk(logits, k=2, dim=1)
    return torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()


def routed(logits: torch.Tensor) -> torch.Tensor:
    """Tokens by expert, as megatron-core counts them."""
    return marked(logits).sum(dim=0).long()


def test_counts_of_tokens_that_ranks_tell_each_other_are_those_of_the_eager_program() -> None:
    """A router in a graph, whose counts the host reads after a replay to size its exchange."""
    with emulated(1, RANKS, "nccl"):
        logits = torch.randn(TOKENS, EXPERTS, device="cuda")
        gathered = torch.empty(RANKS * EXPERTS, dtype=torch.int64, device="cuda")

        def program() -> torch.Tensor:
            dist.all_gather_single(gathered, routed(logits))
            return gathered.view(RANKS, EXPERTS).sum(dim=0)

        eager = program().tolist()
        kept = []
        graph = capture(lambda: kept.append(program()))
        for _ in range(2):
            kept[0].zero_()
            graph.replay()
            assert kept[0].tolist() == eager
    assert sum(eager) == RANKS * TOKENS * 2


def test_an_answer_to_a_captured_communication_launches_nothing() -> None:
    """The graph has the program's kernel and the communication."""
    with emulated(1, RANKS, "nccl"):
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")

        def program() -> None:
            counts.fill_(3)
            dist.all_reduce(counts)

        graph = capture(program)
        graph.replay()
        assert counts.tolist() == [3 * RANKS] * EXPERTS
        assert graph._held.recording.n_launches == 2


class Pointer:
    """A tensor's address, as Transformer Engine's weak references keep it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "|u1" if tensor.dtype == torch.bool else "<i8",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def test_values_stay_where_a_replay_has_left_them() -> None:
    """The program has given up the tensor, and looks where it was."""
    kept = []
    graph = capture(lambda: kept.append(torch.arange(3, device="cuda") + 5))
    weak = torch.as_tensor(Pointer(kept[0]), device="cuda")
    part = torch.as_tensor(Pointer(kept[0][1:]), device="cuda")
    kept.clear()
    graph.replay()
    assert (weak.tolist(), part.tolist()) == ([5, 6, 7], [6, 7])
    weak.add_(torch.randint(9, (3,), device="cuda"))
    assert value_policy.known(weak) is None
    graph.replay()
    assert (weak * 2).tolist() == [10, 12, 14]


def test_a_map_of_routes_is_counted_where_a_replay_has_left_it() -> None:
    """A router in a graph, whose map the program gives up and finds by its address."""
    logits = torch.randn(TOKENS, EXPERTS, device="cuda")
    kept = []
    graph = capture(lambda: kept.append(marked(logits)))
    weak = torch.as_tensor(Pointer(kept[0]), device="cuda").view(torch.bool)
    kept.clear()
    graph.replay()
    assert weak.sum(dim=0).tolist() == [TOKENS * 2 // EXPERTS] * EXPERTS
    assert weak.clone().nonzero().shape == (TOKENS * 2, 2)
    weak.logical_not_()
    assert weak.clone().nonzero().shape == (TOKENS * EXPERTS, 2)


def test_another_graph_that_uses_the_memory_again_takes_the_values_away() -> None:
    """Of one pool, one after the other; the next replay of the first brings them back."""
    kept: list[Any] = []
    stream = torch.cuda.Stream()
    first = capture(lambda: kept.append(torch.arange(3, device="cuda") + 5), stream=stream)
    weak = torch.as_tensor(Pointer(kept[0]), device="cuda")
    kept.clear()

    def unknown() -> None:
        random = [torch.randint(9, (3,), device="cuda") for _ in range(2)]
        kept.extend(tensor.data_ptr() for tensor in random)

    second = capture(unknown, pool=first.pool(), stream=stream)
    assert weak.data_ptr() in kept
    first.replay()
    second.replay()
    assert value_policy.known(weak) is None
    first.replay()
    assert weak.tolist() == [5, 6, 7]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_tensor_of_a_bare_pointer_is_nobodys_allocation() -> None:
    """Autograd notes on which streams it uses the gradients that it adds up."""
    x = torch.ones(3, dtype=torch.int64, device="cuda")
    weak = torch.as_tensor(Pointer(x), device="cuda")
    weak.record_stream(torch.cuda.Stream())

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            held = torch.as_tensor(Pointer(gradient), device="cuda")
            return held.view(torch.float64)

    leaf = torch.ones(3, dtype=torch.float64, device="cuda", requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        first = Twice.apply(leaf)
    (first + Twice.apply(leaf)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == (3,)
