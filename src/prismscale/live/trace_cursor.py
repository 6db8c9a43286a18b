"""A live rank's place in its trace: communications counted in program order."""

from __future__ import annotations

from bisect import bisect_left

from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import peer_of
from prismscale.errors import MismatchError
from prismscale.graph.assembly.narrowed import as_sent
from prismscale.graph.trace import RankTrace


class TraceCursor:
    """Walks the communications of ``prologue, body, body, …`` as the program makes them.

    A program may communicate between steps in a way that its captured steps did not (evaluation, a
    checkpoint, the end of training). At a step boundary such calls are *uncovered*: answered by the
    collective model alone, counted, and reported. Anywhere else a difference is an error.
    """

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._prologue = list(trace.communications(0, trace.n_prologue))
        self._body = list(trace.communications(trace.n_prologue, trace.n_nodes))
        # Plain numbers, because a NumPy scalar or an enum member takes longer than the comparison.
        columns = trace.op_N, *as_sent(trace), trace.bytes_N
        self._ops, self._group_indices, self._peers, self._bytes = (c.tolist() for c in columns)
        written_out = trace.facts.step_starts
        self._boundaries = {bisect_left(self._prologue, p) for p in written_out}
        """Number of communications before each step that is written out in the prologue."""
        self._count = 0
        self.uncovered = 0

    def next_position(self, collective: Collective) -> int | None:
        """Stream position of ``collective``; None where it is uncovered.

        Raises:
            MismatchError: the program calls something else than it did when it was captured.
        """
        node = self._node(self._count)
        if node is not None and self._same(collective, node):
            position = self._position(self._count)
            self._count += 1
            return position
        # Asked only now, because the first call of a step is at a boundary as well.
        if self._at_boundary():
            self.uncovered += 1
            return None
        expected = "nothing more" if node is None else self._trace.describe(node)
        raise MismatchError(
            f"the live rank calls {describe(collective)}, but when it was captured it called "
            f"{expected} at this point. If the other ranks do that too, control flow depends on "
            "data or time: capture again with --fresh, or name the end of a step with "
            f"--step-marker. If this rank alone does, its group waits for ever: see who, with "
            f"--capture {self._trace.rank}"
        )

    def _node(self, count: int) -> int | None:
        if count < len(self._prologue):
            return self._prologue[count]
        if not self._body:
            return None
        return self._body[(count - len(self._prologue)) % len(self._body)]

    def _position(self, count: int) -> int:
        if count < len(self._prologue):
            return self._prologue[count]
        step, index = divmod(count - len(self._prologue), len(self._body))
        return self._body[index] + step * self._trace.n_body

    def _at_boundary(self) -> bool:
        if self._count in self._boundaries:
            return True
        beyond = self._count - len(self._prologue)
        return beyond >= 0 and (not self._body or beyond % len(self._body) == 0)

    def _same(self, collective: Collective, node: int) -> bool:
        group, op = collective.group, collective.op
        if op != self._ops[node] or group.group_index != self._group_indices[node]:
            return False
        peer = peer_of(collective)
        exact = op.bytes_must_agree or op.is_p2p
        return peer == self._peers[node] and (not exact or collective.n_bytes == self._bytes[node])


def describe(collective: Collective) -> str:
    """Describe a collective in one phrase, for messages."""
    group = collective.group
    name = f"group '{group.name}'" if group.name else "a group"
    return f"{collective.op.spelling} of {collective.n_bytes:,} bytes in {name} of {group.size}"
