"""torchrun's options in front of a program, read as prismscale's."""

from __future__ import annotations

import pytest

from prismscale.errors import UsageError
from prismscale.torchrun_options import translated

OURS = {"--out": True, "--fresh": False, "-m": True, "--world-size": True}


def words(text: str) -> list[str]:
    return translated(text.split(), OURS, gpus_per_node=8)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--nnodes 128 --nproc-per-node 8 t.py --tp 2", "--world-size 1024 t.py --tp 2"),
        ("--nnodes=1:4 --nproc_per_node=gpu t.py", "--world-size 32 t.py"),
        ("--standalone --nproc-per-node 4 t.py", "--world-size 4 t.py"),
        ("--rdzv-backend c10d --rdzv_endpoint=a:1 --nnodes 2 --nproc-per-node 8 t.py",
         "--world-size 16 t.py"),
        ("--out x --fresh --nproc-per-node 8 -m pkg.train --nnodes 3",
         "--world-size 8 --out x --fresh -m pkg.train --nnodes 3"),
        ("--event-log-handler null -r 3 -t 3 --nproc-per-node 4 t.py", "--world-size 4 t.py"),
        ("--world-size 16 --nnodes 2 --nproc-per-node 8 t.py",
         "--world-size 16 --world-size 16 t.py"),
        ("--module pkg.train --tp 2", "-m pkg.train --tp 2"),
        ("--out x -- -m pkg.train --tp 2", "--out x -m pkg.train --tp 2"),
        ("-- --nproc-per-node 4 t.py --tp 2", "--world-size 4 t.py --tp 2"),
        ("--out x -- t.py -- --tp 2", "--out x -- t.py -- --tp 2"),
        ("--world-size 8 t.py --nnodes 3", "--world-size 8 t.py --nnodes 3"),
    ],
)  # fmt: skip
def test_sizes_are_multiplied_and_places_left_out(given: str, expected: str) -> None:
    """What stands behind the program is the program's."""
    assert words(given) == expected.split()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--nnodes many t.py", "give a number"),
        ("--nnodes 2 --nproc-per-node 4 t.py", "8 GPUs a node"),
        ("--nproc-per-node 16 t.py", "8 GPUs a node"),
        ("--world-size 4 --nnodes 2 --nproc-per-node 8 t.py", "16 ranks; give one of them"),
        ("--no-python t.sh", "only Python"),
    ],
)
def test_what_cannot_be_followed_is_refused(given: str, told: str) -> None:
    """With a reason."""
    with pytest.raises(UsageError, match=told):
        words(given)
