"""The chain of sources for the values that other ranks would send to an emulated rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from prismscale.analysis.payload_use import PayloadKind, PayloadUse, PayloadUses
from prismscale.devices.null.session import NullEmulation
from prismscale.devices.rank_spec import RankSpec
from prismscale.emulation.hook import Collective
from prismscale.payload.combine import Contributions
from prismscale.payload.mirror import (
    MirrorPayload,
    PayloadRule,
    PayloadSource,
    absent_members,
)
from prismscale.payload.null_integers import ZeroIntegers, exact_value
from prismscale.payload.objects import MIRROR
from prismscale.payload.recorded import RecordedPayload
from prismscale.payload.rules.rule_book import RuleBook
from prismscale.payload.rules.rule_file import RuleFile


class RankPayload:
    """Answers from the user's rules, recorded values, the device's rule and the mirror, in order.

    It counts how often each source answered.
    """

    def __init__(
        self,
        *,
        rules: RuleBook,
        recorded: RecordedPayload | None,
        of_device: PayloadRule | None = None,
        mirror: PayloadSource | None = None,
    ) -> None:
        self.rules = rules
        self._recorded = recorded
        self._of_device = of_device
        self._mirror = mirror or MirrorPayload()
        self._answered: Counter[PayloadKind] = Counter()

    def fill(self, collective: Collective) -> None:
        """Define every output."""
        # Offered even if a rule answers: senders and receivers must number communications alike.
        is_recorded = self._recorded is not None and self._recorded.offer(collective)
        if self.rules.rules and self.rules.offer(
            collective, lambda: self._mirror.fill(collective), is_recorded=is_recorded
        ):
            return
        if absent_members(collective, ()):
            self._answered[PayloadKind.RECORDED if is_recorded else PayloadKind.MIRROR] += 1
        if is_recorded or (self._of_device is not None and self._of_device.offer(collective)):
            return
        self._mirror.fill(collective)

    def fill_among(self, collective: Collective, parts: Contributions) -> None:
        """Define every output where several members are here; ``parts`` is what each contributes.

        Rules speak for absent members. Without a rule they do what a member does that is here.
        """

        def otherwise() -> None:
            self._mirror.fill_among(collective, parts)

        if self.rules.offer(collective, otherwise, here=parts):
            return
        if absent_members(collective, parts):
            self._answered[PayloadKind.MIRROR] += 1
        otherwise()

    @contextmanager
    def in_force(
        self, folder: Path, *, while_true: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """While the block runs, object collectives follow the rules, too.

        They agree with those of other ranks through ``folder``. This rank waits for what the first
        rank leaves there only as long as ``while_true`` answers True.
        """
        with MIRROR.shared_in(folder, while_true=while_true):
            MIRROR.rules = self.rules if self.rules.rules else None
            yield

    def uses(self) -> PayloadUses:
        """Return how many communications each source has answered so far.

        Rules that have answered none are included.
        """
        ruled = (
            PayloadUse(
                kind=PayloadKind.RULES,
                name=rule.name,
                where=rule.where,
                communications=self.rules.answered[rule.name],
            )
            for rule in self.rules.rules
        )
        others = (PayloadUse(kind=kind, communications=n) for kind, n in self._answered.items())
        return PayloadUses(uses=(*ruled, *others))


def rank_payload(
    folder: Path,
    emulation: NullEmulation | None,
    *,
    payload: PayloadKind = PayloadKind.RECORDED,
    rules: str = "",
    is_captured_now: Callable[[int], bool] = lambda rank: False,
) -> RankPayload:
    """Make the payload sources of one rank.

    Args:
        folder: holds the recordings of captured ranks.
        emulation: the null device, if the rank runs on it.
        payload: the first source to ask.
        rules: file of the user's rules; empty for none.
        is_captured_now: whether a rank is being captured, so that what it sends will arrive.

    Raises:
        UsageError, FormatError: the rules file is not usable.
    """
    value_of = torch.Tensor.detach if emulation is None else exact_value
    recorded = RecordedPayload(
        folder,
        is_captured_now=is_captured_now,
        value_of=value_of,
        objects=MIRROR,
    )
    book = RuleBook(RuleFile(path=rules).rules() if rules else (), value_of=value_of)
    return RankPayload(
        rules=book,
        recorded=None if payload is PayloadKind.MIRROR else recorded,
        of_device=None if emulation is None else ZeroIntegers(),
    )


def payload_of(
    spec: RankSpec,
    emulation: NullEmulation | None,
    is_captured_now: Callable[[int], bool] = lambda rank: False,
) -> RankPayload:
    """Make the sources of the rank that ``spec`` describes. Raises as :func:`rank_payload`."""
    return rank_payload(
        Path(spec.payloads),
        emulation,
        payload=spec.payload,
        rules=spec.rules,
        is_captured_now=is_captured_now,
    )
