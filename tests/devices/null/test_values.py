"""Which values are exact on the null device, and how the others are answered and counted."""

from __future__ import annotations

import math

import psutil
import pytest
import torch

from prismscale.devices.null import runtime, value_policy
from prismscale.errors import UsageError


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose value follows from nothing."""
    return torch.empty(*shape, device="cuda", dtype=dtype)


@pytest.fixture(autouse=True)
def fresh_ledger():
    runtime.active().ledger.clear()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda: torch.ones(3, device="cuda").sum().item(), 3.0),
        (lambda: torch.tensor([1, 2, 3], device="cuda").tolist(), [1, 2, 3]),
        (lambda: (torch.arange(4, device="cuda") * 2 + 1).tolist(), [1, 3, 5, 7]),
        (lambda: torch.full((2,), 7.5, device="cuda")[1].item(), 7.5),
        (lambda: torch.tensor([3, 1, 2]).cuda().sort().values.tolist(), [1, 2, 3]),
        (lambda: torch.zeros(3).cuda().scatter_(0, torch.tensor([1]).cuda(), 5)[1].item(), 5),
        (lambda: torch.tensor([0, 3, 0, 4], device="cuda").nonzero().flatten().tolist(), [1, 3]),
        (lambda: bool((torch.tensor(3, device="cuda") > 2).item()), True),
        (lambda: torch.tensor([1.5]).cuda().cpu().item(), 1.5),
        (lambda: torch.ones(4, device="cuda").view(2, 2).t().contiguous()[0].tolist(), [1, 1]),
    ],
)
def test_values_that_follow_from_constants_are_exact(expression, expected) -> None:
    """Small constants and arithmetic on them are computed, and nothing is guessed."""
    assert expression() == expected
    assert runtime.active().ledger.uses() == []


def test_counters_of_a_foreach_op_stay_exact() -> None:
    """Numbers that are counted together keep their values, those in views and of any dtype too."""
    pair = torch.tensor([1.0, 5.0], device="cuda")
    steps = [torch.zeros((), device="cuda"), pair[1], pair[:1]]
    whole = [torch.ones(2, device="cuda"), torch.tensor(3, device="cuda")]
    torch._foreach_add_(steps, 1)
    torch._foreach_mul_([*steps, *whole], 2)

    assert [step.item() for step in steps] == [2.0, 12.0, 4.0]
    assert pair.tolist() == [4.0, 12.0]
    assert [value.tolist() for value in whole] == [[2.0, 2.0], 6]
    assert runtime.active().ledger.uses() == []


def test_writes_through_views_are_seen() -> None:
    """A view shares its storage's value, both ways."""
    base = torch.zeros(4, device="cuda")
    base[1:3].fill_(2)

    assert base.tolist() == [0, 2, 2, 0]


def test_an_unknown_write_forgets_the_value() -> None:
    """What was known is unknown after something unknown was added to it."""
    counter = torch.zeros((), device="cuda")
    counter += unknown(64, 64).mean()

    assert value_policy.known(counter) is None


def test_an_unknown_float_is_finite_and_counted_with_its_line() -> None:
    """loss.item() answers the policy's number; the ledger names this file and function."""
    loss = unknown(8).mean()
    answers = []
    for _ in range(3):
        answers.append(loss.item())
    (use,) = runtime.active().ledger.uses()

    assert answers == [1.0, 1.0, 1.0]
    assert use.count == 3
    assert "test_values.py" in use.call_site
    assert "test_an_unknown_float" in use.call_site


def test_an_unknown_test_is_false() -> None:
    """Comparisons of unknown values end rejection loops."""
    assert not (unknown(4) > 3).any()


def test_an_unknown_check_of_all_elements_passes() -> None:
    """Ranks that compare their weights, as Megatron-LM's test mode does, find them equal."""
    mine, theirs = unknown(64), unknown(64)

    assert torch.all(mine == theirs)
    assert (unknown(4, 8) > 3).all(dim=1).tolist() == [True] * 4
    assert torch.allclose(mine, theirs)
    assert torch.equal(mine, theirs)


def test_a_check_of_constants_is_exact() -> None:
    """What follows from constants is told as it is, a failing check too."""
    zeros, ones = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")

    assert not torch.all(zeros == ones)
    assert not torch.equal(zeros, ones)


def test_a_check_that_is_overwritten_is_a_check_no_longer() -> None:
    """A buffer that once held a check is asked for what it holds now."""
    flag = torch.all(unknown(64) > 0)
    flag.copy_((unknown(64) > 3).any())

    assert not flag


def test_numbers_are_finite_and_nothing_is_nan() -> None:
    """Finiteness checks pass at any size, also after reduction."""
    tensor = unknown(100, 1000)

    assert torch.isfinite(tensor).all().item()
    assert not torch.isnan(tensor).any()
    assert torch.isinf(tensor).sum().item() == 0
    assert torch.isfinite(tensor.sum()).item()


def test_a_real_nan_in_a_constant_is_found() -> None:
    """Known values are not covered up by the finiteness policy."""
    assert torch.isnan(torch.tensor([1.0, math.nan], device="cuda")).tolist() == [False, True]


def test_copies_to_the_host_are_filled_by_the_policy() -> None:
    """Memory that reaches the host never holds garbage."""
    assert unknown(3).cpu().tolist() == [1.0, 1.0, 1.0]
    assert unknown(2, dtype=torch.int64).cpu().tolist() == [1, 1]


def test_data_dependent_shapes_follow_the_policy() -> None:
    """A mask of unknown values keeps the policy's share of the elements."""
    ledger = runtime.active().ledger
    ledger.policy = value_policy.ValuePolicy(nonzero_fraction=0.25)
    try:
        tensor = unknown(100)
        assert tensor.nonzero().shape == (25, 1)
        assert tensor[tensor > 0].shape == (25,)
        assert torch.masked_select(tensor, tensor > 0).shape == (25,)
    finally:
        ledger.policy = value_policy.ValuePolicy()


def test_rows_written_through_a_mask_tell_how_many_it_has() -> None:
    """The backward pass of a model that puts image patches among tokens finds as many."""
    rows = unknown(24, 8).requires_grad_()
    mask = unknown(4, 16) > 0
    embedding = torch.zeros(4, 16, 8, device="cuda")
    embedding[mask] = rows
    embedding.sum().backward()

    assert rows.grad is not None
    assert rows.grad.shape == (24, 8)
    assert mask.nonzero().shape == (24, 2)


def test_routing_is_uniform_and_adds_up() -> None:
    """A histogram of unknown expert indices spreads all tokens evenly."""
    experts = unknown(1000, dtype=torch.int64)
    counts = torch.histc(experts.float(), bins=7, min=0, max=7).int().tolist()

    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 1


def test_routing_given_by_the_user_is_followed() -> None:
    """policy.routing weighs the bins of a histogram with as many bins."""
    ledger = runtime.active().ledger
    ledger.policy = value_policy.ValuePolicy(routing=(3, 1))
    try:
        counts = torch.bincount(unknown(100, dtype=torch.int64), minlength=2)
        assert counts.tolist() == [75, 25]
    finally:
        ledger.policy = value_policy.ValuePolicy()


def test_grad_scaler_finds_no_infinity_and_grows() -> None:
    """The scale of GradScaler follows its growth interval exactly."""
    weight = torch.nn.Parameter(unknown(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    for _ in range(2):
        scaler.scale((weight * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert scaler.get_scale() == 16.0


def test_a_value_can_be_stated() -> None:
    """set_known gives a received message its value; forget takes it away."""
    flag = unknown(2)
    value_policy.set_known(flag, torch.tensor([1.0, 2.0]))
    assert flag.tolist() == [1.0, 2.0]
    value_policy.forget(flag)

    assert value_policy.known(flag) is None


def test_a_policy_that_cannot_be_is_refused() -> None:
    """Fractions and loads out of range are usage errors."""
    with pytest.raises(UsageError, match="nonzero_fraction is 2"):
        value_policy.ValuePolicy(nonzero_fraction=2)


def test_a_value_asked_for_in_backward_names_the_line() -> None:
    """Autograd's own thread has no Python frame: the line that called backward counts."""
    tensor = unknown(8).requires_grad_()
    chosen = tensor[unknown(8) > 0].sum()
    runtime.active().ledger.clear()
    chosen.backward()

    (use,) = runtime.active().ledger.uses()
    assert "in test_a_value_asked_for_in_backward_names_the_line" in use.call_site


def test_what_came_from_the_host_is_known() -> None:
    """A mask that was copied to the device answers as the program's own values say, and so does
    what is computed from it alone."""
    mask = torch.ones(8, 4096, dtype=torch.long)
    assert bool(torch.all(mask.cuda() == 1))
    mask[3, 5] = 0
    on_device = mask.to("cuda", non_blocking=True)
    assert not bool(torch.all(on_device == 1))
    assert on_device.sum().item() == 8 * 4096 - 1
    assert torch.equal(on_device[3].cpu(), mask[3])


def test_what_meets_unknown_values_is_unknown() -> None:
    """Of a known tensor and one without values comes one without values."""
    known, unknown = torch.ones(4096).cuda(), torch.randn(4096, device="cuda")
    assert torch.ops.prismscale_null.is_known(known)
    assert not torch.ops.prismscale_null.is_known(known + unknown)
    known.add_(unknown)
    assert not torch.ops.prismscale_null.is_known(known)


def test_larger_tensors_from_the_host_keep_no_values() -> None:
    """Beyond 1 MiB a tensor's bytes stay on the host."""
    assert torch.ops.prismscale_null.is_known(torch.zeros(1 << 20, dtype=torch.uint8).cuda())
    assert not torch.ops.prismscale_null.is_known(
        torch.zeros((1 << 20) + 1, dtype=torch.uint8).cuda()
    )


def test_known_bytes_are_bounded_together() -> None:
    """What is kept of the host's tensors takes 256 MiB at most, and is given back."""
    kept = [torch.zeros(1 << 20, dtype=torch.uint8).cuda() for _ in range(260)]
    known = [torch.ops.prismscale_null.is_known(t) for t in kept]
    assert known[0]
    assert not known[-1]
    kept.clear()
    assert torch.ops.prismscale_null.is_known(torch.zeros(1 << 20, dtype=torch.uint8).cuda())


@pytest.mark.parametrize(("elements", "times"), [(1 << 27, 4), (1 << 20, 256)])
def test_a_large_copy_to_the_host_takes_no_memory_until_it_is_written(
    elements: int, times: int
) -> None:
    """Gigabytes of offloaded values fit into a small machine, and stay writable: one tensor of
    many, as experts' weights are."""
    before = _own_bytes()
    copies = [unknown(elements, dtype=torch.bfloat16).cpu() for _ in range(times)]
    held = _own_bytes() - before
    copies[0][345_678:345_680] = 3.0

    assert held < 0.3 * elements * times
    assert all(copy[:: 1 << 16].eq(1.0).all() for copy in copies)
    assert copies[0][345_677:345_681].tolist() == [1.0, 3.0, 3.0, 1.0]
    assert copies[1][345_678] == 1.0
    assert copies[0][-1] == 1.0


def test_memory_that_the_program_shares_stays_shared() -> None:
    """A copy into memory that other processes see is written there."""
    shared = torch.zeros(1 << 25).share_memory_()
    view = torch.from_numpy(shared.numpy())
    shared.copy_(unknown(1 << 25))

    assert view[:: 1 << 16].eq(1.0).all()


def _own_bytes() -> int:
    """Memory that this process has to itself."""
    return psutil.Process().memory_full_info().uss
