"""The keys of a job's stores, as its coordinator holds them: what a ``TCPStore`` server does."""

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
        """A value that is there."""
        return self._values[key]

    def write(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._values[key] = value

    def extend(self, key: str, value: bytes) -> None:
        """Lengthen a value."""
        self._values[key] = self._values.get(key, b"") + value

    def add(self, key: str, amount: int) -> int:
        """Raise a counter, which is kept as text, as torch's stores do."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` where the key holds ``expected``, or nothing if that is empty. Returns
        what it holds then."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def remove(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._values.pop(key, None) is not None

    def names(self) -> list[str]:
        """All keys."""
        return list(self._values)

    def push(self, key: str, value: bytes) -> None:
        """Append to a queue."""
        self._queues[key].append(value)

    def pop(self, key: str) -> bytes:
        """Take the oldest of a queue that has some."""
        return self._queues[key].popleft()

    def queued(self, key: str) -> int:
        """How many a queue holds."""
        return len(self._queues[key])
