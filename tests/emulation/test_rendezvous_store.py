"""Stores without peers: what is kept, what is answered, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.utils import store as store_util

from prismscale.emulation.rendezvous_store import EmulatedStore
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import UsageError
from prismscale.payload.absent_peers import absent_peers
from support.emulation import RecordingHook

RANK, WORLD_SIZE = 5, 16


@pytest.fixture(autouse=True)
def _as_one_rank() -> Iterator[None]:
    with absent_peers(RankEnvironment(rank=RANK, world_size=WORLD_SIZE), RecordingHook()):
        yield


def _stores() -> dict[str, EmulatedStore]:
    return {
        "tcp": dist.TCPStore("10.0.0.1", 1234, WORLD_SIZE, False, wait_for_workers=True),
        "file": dist.FileStore("/nowhere/store", WORLD_SIZE),
        "hash": dist.HashStore(),
        "prefix": dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore())),
    }


@pytest.mark.parametrize("kind", ["tcp", "file", "hash", "prefix"])
def test_own_writes_are_read_back(kind: str) -> None:
    """Any store the program constructs keeps what this rank wrote."""
    store = _stores()[kind]
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.check(["key"])
    store.wait(["key"], timedelta(seconds=1))


def test_stores_of_one_address_share_keys() -> None:
    """Two TCPStores of the same host and port are the same store; HashStores are not."""
    first, second = (dist.TCPStore("host", 1, is_master=flag) for flag in (True, False))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert (second.host, second.port) == ("host", 1)
    dist.HashStore().set("other", "value")
    assert not dist.HashStore().check(["other"])


def test_counters_answer_as_if_every_rank_had_added() -> None:
    """The first addition is this rank's ticket; afterwards all have arrived."""
    store = dist.HashStore()
    assert store.add("arrived", 1) == RANK + 1
    assert store.add("arrived", 0) == WORLD_SIZE
    assert store.get("arrived") == str(WORLD_SIZE).encode()
    assert store.add("arrived", 1) == WORLD_SIZE + RANK + 1
    assert store.add("never raised", 0) == 0


def test_numbers_set_as_text_are_ordinary_values() -> None:
    """add on a key that this rank set counts from that value."""
    store = dist.HashStore()
    store.set("epoch", "3")
    assert store.add("epoch", 1) == 4
    assert store.get("epoch") == b"4"


def test_torchs_store_barrier_passes() -> None:
    """The barrier after group creation does not wait for absent ranks."""
    timeout = timedelta(seconds=5)
    store = dist.PrefixStore("default", dist.HashStore())
    # Raises after the timeout otherwise.
    distributed_c10d._store_based_barrier(RANK, store, "group", WORLD_SIZE, timeout)
    distributed_c10d._store_based_barrier(RANK, store, "subgroup", 3, timeout)


def test_elastic_barrier_and_synchronize_pass() -> None:
    """torchelastic's store barrier and data exchange complete with this rank's data."""
    store = dist.HashStore()
    store_util.barrier(store, WORLD_SIZE, key_prefix="train/", barrier_timeout=5)
    everyone = store_util.synchronize(store, b"data", RANK, WORLD_SIZE, key_prefix="who/")
    assert everyone == [b"data"] * WORLD_SIZE


def test_analogous_keys_answer_this_ranks_value() -> None:
    """A peer's key reads as this rank's own key of the same form."""
    store = dist.PrefixStore("p", dist.HashStore())
    store.set(f"rank{RANK}/address", "here")
    assert store.get("rank11/address") == b"here"
    assert store.multi_get(["rank0/address", "rank1/address"]) == [b"here", b"here"]


@pytest.mark.parametrize("call", ["get", "wait", "multi_get"])
def test_waiting_for_an_absent_peer_is_refused(call: str) -> None:
    """A key that only a peer would write is an error with the key and the line, not a hang."""
    store = dist.PrefixStore("p", dist.HashStore())
    argument = "unique_id" if call == "get" else ["unique_id"]
    with pytest.raises(UsageError, match=r"'p/unique_id'.*test_rendezvous_store\.py:\d+"):
        getattr(store, call)(argument)
    assert not store.check(["unique_id"])


def test_compare_and_set_follows_tcpstore() -> None:
    """An absent key is set where nothing is expected; otherwise the present value answers."""
    store = dist.HashStore()
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "wrong", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.compare_set("absent", "x", "y") == b"x"


def test_keys_can_be_counted_and_deleted() -> None:
    """num_keys, list_keys and delete_key are about this rank's keys."""
    store = dist.HashStore()
    store.set("a", "1")
    store.append("a", "2")
    store.add("b", 1)
    assert (store.get("a"), store.num_keys(), sorted(store.list_keys())) == (b"12", 2, ["a", "b"])
    assert store.delete_key("a")
    assert not store.delete_key("a")


def test_queues_hold_this_ranks_entries() -> None:
    """Queues are first in, first out; an empty one does not block."""
    store = dist.HashStore()
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert (store.queue_pop("q"), store.queue_len("q")) == (b"1", 1)
    store.queue_pop("q")
    with pytest.raises(UsageError, match="'q'"):
        store.queue_pop("q")


def test_an_explicit_store_initialises_the_group() -> None:
    """init_process_group takes a store that the program made."""
    store = dist.TCPStore("host", 1, WORLD_SIZE, is_master=False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    default = distributed_c10d._get_default_store()
    default.set("key", "value")
    assert default.get("key") == b"value"
