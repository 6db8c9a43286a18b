"""Keys of a job's stores in the coordinator, which does what a ``TCPStore`` server does."""

from __future__ import annotations

from collections import defaultdict, deque


class Keys:
    """Keys and queues of one store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def has(self, key: str) -> bool:
        """Whether a read of ``key`` returns at once."""
        return key in self._values

    def has_queued(self, key: str) -> bool:
        """Whether a pop of ``key`` returns at once."""
        return bool(self._queues[key])

    def read(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return self._values[key]

    def write(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        self._values[key] = value

    def extend(self, key: str, value: bytes) -> None:
        """Append to a key's value."""
        self._values[key] = self._values.get(key, b"") + value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is kept as text as in torch's stores. Returns the new count."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the key holds ``expected``; empty matches a missing key.

        Returns the key's value afterwards, or ``expected`` if there is none.
        """
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def remove(self, key: str) -> bool:
        """Delete a key. Returns whether it existed."""
        return self._values.pop(key, None) is not None

    def names(self) -> list[str]:
        """Return all keys."""
        return list(self._values)

    def push(self, key: str, value: bytes) -> None:
        """Append to a queue."""
        self._queues[key].append(value)

    def pop(self, key: str) -> bytes:
        """Take the oldest entry of a queue that is not empty."""
        return self._queues[key].popleft()

    def queued(self, key: str) -> int:
        """Return the number of entries in a queue."""
        return len(self._queues[key])
