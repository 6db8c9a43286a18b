"""What is real in a live rank's communications on a CPU: recorded answers and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prismscale.analysis.moved import Moved
from prismscale.analysis.payload_use import PayloadKind, PayloadUse, PayloadUses
from prismscale.live.live_spec import LiveSpec
from prismscale.live.recorded_answers import RecordedAnswers
from prismscale.payload.recordings.recorded_job import RecordedJob
from prismscale.transfers.gloo_links import join
from prismscale.transfers.schedule import Algorithm
from prismscale.transfers.told import AssistantWire
from prismscale.transfers.transfer_load import TransferLoad

ADDRESS = "assistants"
"""Name of the socket, in the folder that live ranks share."""


@dataclass(frozen=True, kw_only=True)
class RealPart:
    """Recorded answers and real transfers of one live rank.

    ``recorded`` is None if nothing was recorded, ``transfers`` is None if nothing is sent.
    """

    recorded: RecordedAnswers | None = None
    transfers: TransferLoad | None = None

    @staticmethod
    def of(spec: LiveSpec) -> RealPart:
        """Read the recording, and connect to the other live ranks and the assistants.

        Raises:
            FormatError: the recording is damaged.
            UsageError: a network namespace cannot be entered.
        """
        recorded = None
        if spec.recordings and spec.payload is not PayloadKind.MIRROR:
            recording = RecordedJob.load(Path(spec.recordings))
            if recording is not None:
                recorded = RecordedAnswers(recording=recording, live=frozenset(spec.live))
        if not spec.transfers.are_real:
            return RealPart(recorded=recorded)
        place, size = spec.live.index(spec.rank), len(spec.live) + 1
        namespace = spec.transfers.namespaces.get(str(spec.rank), "")
        folder = Path(spec.exchange)
        return RealPart(
            recorded=recorded,
            transfers=TransferLoad(
                rank=spec.rank,
                live=spec.live,
                context=join(folder, place, size, namespace),
                wire=AssistantWire(folder / ADDRESS, spec.rank),
                is_known=recorded.knows if recorded else lambda name, collective: False,
                algorithm=Algorithm.TREE if spec.transfers.kind == "tree" else Algorithm.RING,
            ),
        )

    def moved(self) -> Moved:
        """Amounts that were really sent and received."""
        return Moved() if self.transfers is None else self.transfers.moved()

    def uses(self) -> PayloadUses:
        """Number of communications that the recording has answered."""
        answered = self.recorded.answered if self.recorded else 0
        if self.transfers is not None:
            answered += self.transfers.recorded
        if not answered:
            return PayloadUses()
        return PayloadUses(uses=(PayloadUse(kind=PayloadKind.RECORDED, communications=answered),))
