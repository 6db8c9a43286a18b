"""The keeper of gates: lets groups of processes take steps in turn."""

from __future__ import annotations

import socket
import threading
from pathlib import Path


class Keeper:
    """Grants one step to each team in turn; a team is all processes whose name begins alike."""

    def __init__(self, path: Path, teams: dict[str, int]) -> None:
        """``teams`` maps a name's first word to how many processes it has."""
        self._teams = teams
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(sum(teams.values()))
        self._members: dict[str, list[socket.socket]] = {team: [] for team in teams}
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

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

    @staticmethod
    def _turn(members: list[socket.socket]) -> None:
        for member in list(members):
            try:
                member.sendall(b".")
            except OSError:
                members.remove(member)
        for member in list(members):
            # An empty answer is a process that ended.
            if member.recv(1) == b"":
                members.remove(member)
