"""A store's keys on a rank whose peers run too: the coordinator holds them."""

from __future__ import annotations

from typing import Any

from prismscale.emulation.rendezvous_store import KeySpace
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.switching.questions import Questions


class SharedKeys(KeySpace):
    """Keys of the store at one address, shared by all ranks. A read waits for the key."""

    def __init__(self, environment: RankEnvironment, questions: Questions, address: str) -> None:
        super().__init__(environment)
        self._questions, self._address = questions, address

    def _ask(self, do: str, key: str = "", value: Any = "") -> Any:
        question = {"ask": "store", "do": do, "store": self._address, "key": key, "value": value}
        return self._questions.ask(question)["value"]

    def read(self, key: str) -> bytes:
        """Return the value of a key; waits until it exists."""
        return _bytes(self._ask("read", key))

    def has(self, key: str) -> bool:
        """Whether the key exists."""
        return bool(self._ask("has", key))

    def write(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        self._ask("write", key, _text(value))

    def extend(self, key: str, value: bytes) -> None:
        """Append to a key's value."""
        self._ask("extend", key, _text(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Returns the new count."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the key holds ``expected``; empty matches a missing key."""
        return _bytes(self._ask("compare_set", key, [_text(expected), _text(desired)]))

    def remove(self, key: str) -> bool:
        """Delete a key. Returns whether it existed."""
        return bool(self._ask("remove", key))

    def names(self) -> list[str]:
        """Return all keys."""
        return list(self._ask("names"))

    def push(self, key: str, value: bytes) -> None:
        """Append to a queue."""
        self._ask("push", key, _text(value))

    def pop(self, key: str) -> bytes:
        """Take the oldest entry of a queue; waits until there is one."""
        return _bytes(self._ask("pop", key))

    def queued(self, key: str) -> int:
        """Return the number of entries in a queue."""
        return int(self._ask("queued", key))


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
