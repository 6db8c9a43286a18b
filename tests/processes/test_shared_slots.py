"""Places that processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prismscale.processes.children import Children, Program
from prismscale.processes.shared_slots import SharedSlots, SharingStarter
from prismscale.processes.starter import Spawner

HOLDER = """
import pathlib, sys, time
from prismscale.processes.shared_slots import SharedSlots
print(SharedSlots(folder=pathlib.Path(sys.argv[1]), count=1).take() is not None, flush=True)
time.sleep(300)
"""


def test_no_more_places_are_taken_than_there_are(tmp_path: Path) -> None:
    """A place that was given back can be taken again."""
    shared = SharedSlots(folder=tmp_path, count=2)
    first, second = shared.take(), shared.take()
    assert first is not None
    assert second is not None
    assert shared.take() is None
    os.close(first)
    assert shared.take() is not None


def test_a_place_goes_with_its_process(tmp_path: Path) -> None:
    """However that ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    shared = SharedSlots(folder=tmp_path, count=1)
    assert shared.take() is None
    holder.kill()
    holder.communicate()
    assert shared.take() is not None


def test_a_process_holds_its_place_until_it_ends(tmp_path: Path) -> None:
    """Two that share places start no more than there are."""
    shared = SharedSlots(folder=tmp_path, count=1)
    one, other = (SharingStarter(inner=Spawner(), shared=shared) for _ in range(2))
    with Children() as children:
        program = Program(name="0", module="timeit", arguments=("-n1", "1"), log=tmp_path / "log")
        assert one.has_room()
        child = one.start(children, program)
        assert not other.has_room()
        child.process.wait(60)
        assert one.has_room()
        assert not other.has_room()
        one.close()
        assert other.has_room()
        other.close()
