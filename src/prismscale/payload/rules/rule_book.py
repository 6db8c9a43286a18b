"""All rules of a job on one rank: finds the rule that answers a communication, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work

from prismscale.emulation.call_site import call_site
from prismscale.emulation.hook import Collective, CommunicationHook, GroupHandle
from prismscale.errors import PrismscaleError, UsageError
from prismscale.payload.combine import Contributions
from prismscale.payload.mirror import absent_members
from prismscale.payload.objects import MIRROR, RuledObjects
from prismscale.payload.rules.rule import Communication, Rule
from prismscale.payload.rules.values import (
    ValueOf,
    in_host_memory,
    is_own,
    write_said,
)


class RuleBook:
    """The rules of one rank, of which at most one may apply to a communication.

    ``value_of`` reads this rank's contribution from a device.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        value_of: ValueOf = torch.Tensor.detach,
    ) -> None:
        self.rules = tuple(rules)
        self._value_of = value_of
        self.answered: Counter[str] = Counter()
        """Number of answered communications by rule name."""

    def offer(
        self,
        collective: Collective,
        otherwise: Callable[[], None],
        *,
        here: Contributions | None = None,
        is_recorded: bool = False,
    ) -> bool:
        """Define the outputs if a rule applies, and return whether one does.

        Args:
            collective: communication to answer.
            otherwise: defines the outputs if they depend on this rank's contribution and that is
                unknown.
            here: contributions to this rank's outputs of the members that are here.
            is_recorded: a recorded value has already defined the outputs.

        Raises:
            UsageError: two rules apply, or a rule fails, gives a value that does not fit, or
                demands a recorded value where there is none.
        """
        here = here or {}
        # The parts of an object collective are not communications of the program's own.
        if not self.rules or MIRROR.is_calling:
            return False
        matching = [rule for rule in self.rules if rule.match.covers(collective)]
        members = absent_members(collective, here) if matching else []
        if not members:
            return False
        site = collective.site or call_site()
        rule = _only(matching, collective.op.spelling, collective.group, site)
        if rule is None:
            return False
        if rule.is_recorded:
            _require(is_recorded, rule, collective.op.spelling, site)
        else:
            told = self._told(collective, rule, site)
            said = _ask(rule, told, members)
            if said is None:
                return False
            on_host = in_host_memory(collective, self._value_of)
            if on_host is None:
                otherwise()
            else:
                write_said(on_host, rule, said, here)
                _copy_back(on_host, collective)
        self.answered[rule.name] += 1
        return True

    def objects(
        self, op: str, group: GroupHandle, objects: Sequence[Any], root: int = -1
    ) -> RuledObjects | None:
        """Return what arrives in an object collective; None if no rule applies.

        The answer has as many objects as ``objects``, or one of each member.

        Raises:
            UsageError: as :meth:`offer`.
        """
        if root == group.group_rank:
            return None
        site = call_site()
        matching = [rule for rule in self.rules if rule.match.covers_call(op, group.name)]
        rule = _only(matching, op, group, site)
        if rule is None:
            return None
        told = Communication(
            op=op,
            group=group.name,
            ranks=group.ranks,
            group_rank=group.group_rank,
            root=root,
            site=site,
            number=self.answered[rule.name],
            objects=tuple(objects),
        )
        if rule.is_recorded:
            answer: RuledObjects | None = RuledObjects(
                must_arrive=f"rule {rule} wants a recorded value at {site}"
            )
        else:
            answer = _of_root(rule, told) if root >= 0 else _of_members(rule, told)
        # As with tensors, a rule that says nothing has not answered.
        self.answered[rule.name] += answer is not None
        return answer

    def noting_sites(self, hook: CommunicationHook) -> CommunicationHook:
        """Return ``hook``; if a rule matches by site, wrapped so that call sites are noted first.

        The outputs may be defined later, when the program waits.
        """
        return SiteNotes(hook) if any(rule.match.site for rule in self.rules) else hook

    def _told(self, collective: Collective, rule: Rule, site: str) -> Communication:
        group = collective.group
        return Communication(
            op=collective.op.spelling,
            group=group.name,
            ranks=group.ranks,
            group_rank=group.group_rank,
            root=collective.root,
            site=site,
            number=self.answered[rule.name],
            inputs=collective.inputs,
            outputs=collective.outputs,
        )


class SiteNotes:
    """A hook that notes the call site of each communication and passes it on to another hook."""

    def __init__(self, hook: CommunicationHook) -> None:
        self._hook = hook

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Note the call site, and pass the batch on."""
        site = ""
        for collective in batch:
            if not collective.site:
                site = site or call_site()
                collective.site = site
        return self._hook.communicate(batch)


def _only(rules: Sequence[Rule], op: str, group: GroupHandle, site: str) -> Rule | None:
    found = [rule for rule in rules if rule.match.covers_site(site)]
    if len(found) > 1:
        where = f"group '{group.name}' of {group.size} at {site or 'an unknown line'}"
        raise UsageError(
            f"rules {' and '.join(map(str, found))} are both for {op} in {where}: narrow one of "
            "them (op, group, site, dtype, numel)"
        )
    return found[0] if found else None


def _require(is_recorded: bool, rule: Rule, op: str, site: str) -> None:
    if not is_recorded:
        raise UsageError(
            f"rule {rule} wants a recorded value for {op} at {site}, and the rank that sends it "
            "was not captured: only ranks that are captured leave what they send (--max-captures)"
        )


def _ask(rule: Rule, told: Communication, members: Sequence[int]) -> dict[int, Any] | None:
    if not rule.is_per_peer:
        value = _call(rule, told, members[0])
        return None if value is None else dict.fromkeys(members, value)
    said = {member: _call(rule, told, member) for member in members}
    return None if any(value is None for value in said.values()) else said


def _call(rule: Rule, told: Communication, member: int) -> Any:
    try:
        return rule.contribute(told, member)
    except PrismscaleError:
        raise
    except Exception as error:
        raise UsageError(
            f"rule {rule} failed for {told.op} at {told.site}: {type(error).__name__}: {error}"
        ) from error


def _of_root(rule: Rule, told: Communication) -> RuledObjects | None:
    value = _call(rule, told, told.root)
    if value is None:
        return None
    if is_own(value):
        value = told.objects
    if not isinstance(value, list | tuple) or len(value) != len(told.objects):
        raise UsageError(
            f"rule {rule} gives {value!r} for {told.op}; it is to give a list of "
            f"{len(told.objects)} objects"
        )
    return RuledObjects(objects=list(value))


def _of_members(rule: Rule, told: Communication) -> RuledObjects | None:
    found = []
    for member in range(len(told.ranks)):
        own = member == told.group_rank
        value = told.objects[0] if own else _call(rule, told, member)
        if value is None and not own:
            return None
        found.append(told.objects[0] if is_own(value) else value)
    return RuledObjects(objects=found)


def _copy_back(on_host: Collective, collective: Collective) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        for output, value in zip(collective.outputs, on_host.outputs, strict=True):
            if output is not value:
                output.copy_(value)
