"""The keeper of gates: lets groups of processes take steps in turn."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from pathlib import Path


class Keeper:
    """Grants steps to each team in turn; a team is all processes whose name begins alike."""

    def __init__(self, path: Path, teams: dict[str, int], *, steps: int = 1) -> None:
        """``teams`` maps a name's first word to how many processes it has.

        A turn is ``steps`` steps of each member. Within it members do not wait for each other here.
        """
        self._teams = teams
        self._steps = steps
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(sum(teams.values()))
        self._members: dict[str, list[socket.socket]] = {team: [] for team in teams}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hold nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for member in [m for members in self._members.values() for m in members]:
            with contextlib.suppress(OSError):
                member.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        # A closed listener ends the wait for those who have not come.
        with self._listener, contextlib.suppress(OSError):
            self._keep()

    def _keep(self) -> None:
        for _ in range(sum(self._teams.values())):
            connection, _ = self._listener.accept()
            name = b""
            while not name.endswith(b"\n"):
                name += connection.recv(1)
            self._members[name.split()[0].decode()].append(connection)
        # Everybody reports once before the first turn.
        for members in self._members.values():
            for member in members:
                member.recv(1)
        while any(self._members.values()):
            for members in self._members.values():
                self._turn(members)

    def _turn(self, members: list[socket.socket]) -> None:
        left = dict.fromkeys(members, self._steps)
        with selectors.DefaultSelector() as selector:
            for member in tuple(members):
                if self._grant(member, members):
                    selector.register(member, selectors.EVENT_READ, member)
            while selector.get_map():
                for key, _ in selector.select():
                    member = key.data
                    # An empty answer is a process that ended.
                    ended = member.recv(1) == b""
                    if ended:
                        members.remove(member)
                    left[member] -= 1
                    if ended or left[member] == 0 or not self._grant(member, members):
                        selector.unregister(member)

    @staticmethod
    def _grant(member: socket.socket, members: list[socket.socket]) -> bool:
        """Let a member take a step; False for one that is gone, which is forgotten."""
        try:
            member.sendall(b".")
        except OSError:
            members.remove(member)
            return False
        return True
