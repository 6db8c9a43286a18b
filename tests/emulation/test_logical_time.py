"""``time`` that answers logical time."""

from __future__ import annotations

import threading
import time
from multiprocessing import Pipe, Queue, get_context
from queue import Empty

import pytest

from prismscale.emulation.logical_time import answering_time


@pytest.mark.parametrize("name", ["time", "perf_counter", "monotonic"])
def test_timers_move_with_logical_time_only(name: str) -> None:
    """Seconds and nanoseconds, continuing from where they were, and real again afterwards."""
    original, now = getattr(time, name), [5]
    with answering_time(lambda: now[0], lambda ns: None):
        began, began_ns = getattr(time, name)(), getattr(time, f"{name}_ns")()
        now[0] += 2_000_000_000
        assert getattr(time, name)() == pytest.approx(began + 2)
        assert getattr(time, f"{name}_ns")() == began_ns + 2_000_000_000
    assert getattr(time, name) is original


def test_sleeping_passes_logical_time() -> None:
    """An hour of it, whatever real time that takes."""
    original, now = time.sleep, [5]

    def pass_ns(by_ns: int) -> None:
        now[0] += by_ns

    with answering_time(lambda: now[0], pass_ns):
        time.sleep(3600)
    assert now[0] == 5 + 3_600_000_000_000
    assert time.sleep is original


def test_other_threads_sleep_in_real_time() -> None:
    """Theirs is not the program's."""
    now = [5]
    with answering_time(lambda: now[0], now.append):
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        thread.join()
    assert now == [5]


def test_a_negative_sleep_is_refused_as_ever() -> None:
    """By Python itself."""
    with answering_time(lambda: 5, lambda ns: None), pytest.raises(ValueError, match="negative"):
        time.sleep(-1)


def test_waiting_for_other_processes_ends_in_real_time() -> None:
    """A timeout that is over is seen, though logical time stands still."""
    reading, _writing = Pipe(duplex=False)
    queue: Queue[int] = Queue()
    with answering_time(lambda: 5, lambda ns: None):
        assert not reading.poll(0)
        assert not reading.poll(0.01)
        with pytest.raises(Empty):
            queue.get(timeout=0.01)


def test_a_pool_of_processes_ends() -> None:
    """Its helper thread looks whether its workers have changed."""
    with answering_time(lambda: 5, lambda ns: None):
        pool = get_context("fork").Pool(1)
        assert pool.map(abs, [-1, 2]) == [1, 2]
        pool.close()
        pool.join()
