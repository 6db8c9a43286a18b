"""A store's keys as a rank sees them when its peers are there: the coordinator holds them."""

from __future__ import annotations

from typing import Any

from prismscale.emulation.rendezvous_store import KeySpace
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.switching.questions import Questions


class SharedKeys(KeySpace):
    """Keys that all ranks of the job share, by address. A read waits until a rank has written."""

    def __init__(self, environment: RankEnvironment, questions: Questions, address: str) -> None:
        super().__init__(environment)
        self._questions, self._address = questions, address

    def _ask(self, do: str, key: str = "", value: Any = "") -> Any:
        question = {"ask": "store", "do": do, "store": self._address, "key": key, "value": value}
        return self._questions.ask(question)["value"]

    def read(self, key: str) -> bytes:
        """The value, once it is there."""
        return _bytes(self._ask("read", key))

    def has(self, key: str) -> bool:
        """Whether it is there."""
        return bool(self._ask("has", key))

    def write(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._ask("write", key, _text(value))

    def extend(self, key: str, value: bytes) -> None:
        """Lengthen a key's value."""
        self._ask("extend", key, _text(value))

    def add(self, key: str, amount: int) -> int:
        """Raise a counter."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` where the key holds ``expected`` (or nothing, if that is empty)."""
        return _bytes(self._ask("compare_set", key, [_text(expected), _text(desired)]))

    def remove(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask("remove", key))

    def names(self) -> list[str]:
        """All keys."""
        return list(self._ask("names"))

    def push(self, key: str, value: bytes) -> None:
        """Append to a queue."""
        self._ask("push", key, _text(value))

    def pop(self, key: str) -> bytes:
        """Take from a queue, once it holds something."""
        return _bytes(self._ask("pop", key))

    def queued(self, key: str) -> int:
        """Entries in a queue."""
        return int(self._ask("queued", key))


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
