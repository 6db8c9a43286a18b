"""A connection to Ray, which keeps the signals of the process that connects."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from types import FrameType

import pytest
import ray

from prismscale.errors import UsageError
from prismscale.processes.ray_cluster import connected_ray, first_done


class Ended(BaseException):
    """What a command's handler raises."""


@pytest.fixture
def ending() -> Iterator[None]:
    """SIGTERM and SIGALRM raise it."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    before = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_signal_ends_what_waits_for_ray(number: signal.Signals) -> None:
    """As the handler says it: Ray has one of its own for SIGTERM, and wraps what others raise."""
    with pytest.raises(Ended):
        _wait_until(number)
    assert not ray.is_initialized()


def _wait_until(number: signal.Signals) -> None:
    with connected_ray(None):
        never = ray.remote(num_cpus=10_000)(_nothing).remote()  # no node has as many
        sender = Timer(1, os.kill, (os.getpid(), number))
        sender.start()
        first_done(ray, [never])


def _nothing() -> None: ...


@pytest.mark.usefixtures("ending")
def test_a_signal_is_handled_when_ray_is_gone() -> None:
    """Ray takes its handlers away, and what lies under them."""
    with connected_ray(None):
        pass
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)


def test_files_of_ray_without_a_place_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message names the folder, and the variable that names another."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "not_there"))
    with pytest.raises(UsageError, match=r"not_there.*RAY_TMPDIR"), connected_ray(None):
        pass
    assert not ray.is_initialized()
