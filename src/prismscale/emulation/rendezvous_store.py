"""Key-value stores without peers, for rendezvous and for programs that talk through a store.

Nothing is bound, connected or written to disk. This rank's own writes are kept; what absent ranks
would have written is answered by these rules, in this order:

1. **Own write.** A key that this rank set is read back.
2. **Counter.** ``add(key, n)`` counts as if every rank adds the same, in rank order: this rank's
   first ``add(key, 1)`` answers ``rank + 1`` (its ticket), and a later read or ``add(key, 0)``
   answers ``world_size``: all have arrived.
3. **Arrival flag.** A key that belongs to such a counter (``<counter>…``, or a neighbour in the
   counter's folder such as ``…/last_member`` beside ``…/num_members``) is what the last arrival
   would set; it reads as ``b"1"``.
4. **Analogous key.** A key that equals one this rank wrote, but for the rank number in it, reads
   as this rank's own value.
5. **Unknown key.** A real store would wait for ever: ``get`` and ``wait`` raise
   :class:`UsageError` with the key and the line of the program that waits; ``check`` answers
   False.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed.distributed_c10d import Store

from prismscale.emulation.call_site import call_site
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import UsageError

_ARRIVED = b"1"
_NUMBER = re.compile(r"\d+")


class KeySpace:
    """The keys of one job, seen from one rank; stores of the same address share it."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._rank = environment.rank
        self._world_size = environment.world_size
        own = (environment.rank, environment.local_rank, environment.node_rank)
        self._own_numbers = tuple(dict.fromkeys(str(number) for number in own))
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._queues: dict[str, list[bytes]] = {}

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value by rule 2."""
        before = self._counters.get(key)
        if before is None and key in self._values:
            # A number that this rank wrote as text: an ordinary value, not a shared counter.
            value = int(self._values[key]) + amount
            self._values[key] = str(value).encode()
            return value
        if amount == 0:
            return (before or 0) * self._world_size
        self._counters[key] = (before or 0) + amount
        return (before or 0) * self._world_size + amount * (self._rank + 1)

    def read(self, key: str) -> bytes:
        """Return the value of a key by the module's rules.

        Raises:
            UsageError: no rule answers.
        """
        value = self.lookup(key)
        if value is None:
            raise UsageError(
                f"the store key {key!r} is written only by a rank that does not exist here, so "
                f"{call_site()} would wait for ever: let every rank write its own key, or pass "
                "the value through torch.distributed.broadcast_object_list"
            )
        return value

    def has(self, key: str) -> bool:
        """Whether :meth:`read` returns at once."""
        return self.lookup(key) is not None

    def write(self, key: str, value: bytes) -> None:
        """Set a key that this rank writes."""
        self._values[key] = value

    def extend(self, key: str, value: bytes) -> None:
        """Lengthen a key's value."""
        self._values[key] = self._values.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` where the key holds ``expected`` (or nothing, if that is empty)."""
        current = self.lookup(key)
        if current == expected or (current is None and not expected):
            self._values[key] = desired
            return desired
        return expected if current is None else current

    def push(self, key: str, value: bytes) -> None:
        """Append to a queue."""
        self._queues.setdefault(key, []).append(value)

    def pop(self, key: str) -> bytes:
        """Take from a queue. An empty one is read as a key, and raises as :meth:`read` does."""
        queue = self._queues.get(key)
        return queue.pop(0) if queue else self.read(key)

    def queued(self, key: str) -> int:
        """Return the number of entries in a queue."""
        return len(self._queues.get(key, ()))

    def lookup(self, key: str) -> bytes | None:
        """Return the value of a key by rules 1 to 4, or None if no rule answers."""
        if key in self._values:
            return self._values[key]
        if key in self._counters:
            return str(self.add(key, 0)).encode()
        if any(_is_flag_of(counter, key) for counter in self._counters):
            return _ARRIVED
        return self._analogous(key)

    def _analogous(self, key: str) -> bytes | None:
        for match in _NUMBER.finditer(key):
            for own in self._own_numbers:
                value = self._values.get(key[: match.start()] + own + key[match.end() :])
                if value is not None:
                    return value
        return None

    def remove(self, key: str) -> bool:
        """Forget a key; return whether it was there."""
        removed = self._values.pop(key, None) is not None
        return self._counters.pop(key, None) is not None or removed

    def names(self) -> list[str]:
        """Return all keys that this rank wrote."""
        return [*self._values, *self._counters]


def _is_flag_of(counter: str, key: str) -> bool:
    folder, slash, _ = counter.rpartition("/")
    return key.startswith(counter) or (bool(slash) and key.rpartition("/")[0] == folder)


class EmulatedStore(Store):
    """A ``torch.distributed.Store`` on a :class:`KeySpace`."""

    _made: ClassVar[Callable[[str], KeySpace] | None] = None
    """Makes the key space of an address; None outside an emulation."""
    _spaces: ClassVar[dict[str, KeySpace]] = {}
    _alive: ClassVar[list[EmulatedStore]] = []
    """Keeps Python halves of stores alive: C++ holders (PrefixStore) keep only the C++ halves."""

    def __init__(self, address: str = "") -> None:
        super().__init__()
        made = EmulatedStore._made
        if made is None:
            raise UsageError(
                "an emulated store was created outside `with install(...)`: create it inside"
            )
        spaces = EmulatedStore._spaces
        if address not in spaces:
            spaces[address] = made(address)
        self._space = spaces[address]
        self._timeout = timedelta(minutes=5)
        EmulatedStore._alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._space.write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Read a key by the module's rules."""
        return self._space.read(key)

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return its value by the module's rules."""
        return self._space.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Lengthen a key's value."""
        self._space.extend(key, _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether :meth:`wait` would return."""
        return all(self._space.has(key) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once every key has a value; where peers are absent, return at once or raise."""
        for key in keys:
            self._space.read(key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write ``desired`` where the key holds ``expected`` (or nothing, if that is empty)."""
        return self._space.compare_set(key, _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether it was there."""
        return self._space.remove(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several keys."""
        return [self._space.read(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """Return the number of keys that this rank knows."""
        return len(self._space.names())

    def list_keys(self) -> list[str]:
        """Return the keys that this rank knows."""
        return self._space.names()

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to a queue."""
        self._space.push(key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take from a queue; raise for an entry that only absent ranks would push."""
        return self._space.pop(key)

    def queue_len(self, key: str) -> int:
        """Return the number of entries in a queue."""
        return self._space.queued(key)

    def has_extended_api(self) -> bool:
        """Return True: ``append``, ``multi_get`` and ``multi_set`` exist."""
        return True

    def clone(self) -> EmulatedStore:
        """Return another handle on the same keys."""
        twin = EmulatedStore()
        # Each handle has a C++ half of its own.
        twin._space = self._space
        return twin

    def set_timeout(self, timeout: timedelta) -> None:
        """Keep the timeout; nothing here takes time."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """The timeout as set."""
        return self._timeout


class EmulatedTCPStore(EmulatedStore):
    """``TCPStore``: neither listens nor connects, and waits for no worker."""

    def __init__(
        self,
        host_name: str,
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(minutes=5),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        super().__init__(f"tcp://{host_name}:{port}")
        self._timeout = timeout
        self.host = host_name
        self.port = port
        self.libuvBackend = use_libuv


class EmulatedFileStore(EmulatedStore):
    """``FileStore``: the file is not created."""

    def __init__(self, path: str, world_size: int = -1) -> None:
        super().__init__(f"file://{path}")
        self.path = path


class EmulatedHashStore(EmulatedStore):
    """``HashStore``: its keys belong to this object alone; no other rank ever had them."""

    def __init__(self) -> None:
        super().__init__()
        self._space = type(self)._own()

    _own: ClassVar[Callable[[], KeySpace]]


@contextlib.contextmanager
def shared_by(
    environment: RankEnvironment, keys: Callable[[str], KeySpace] | None = None
) -> Iterator[None]:
    """Let stores created in the block belong to this rank and share keys by address.

    ``keys`` makes the key space of an address if this rank alone does not determine it.
    """
    EmulatedStore._made = keys or (lambda address: KeySpace(environment))
    EmulatedHashStore._own = lambda: KeySpace(environment)
    try:
        yield
    finally:
        EmulatedStore._made = None
        EmulatedStore._spaces.clear()
        EmulatedStore._alive.clear()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
