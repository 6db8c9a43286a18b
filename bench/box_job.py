"""Runs processes of real ranks on the machines of a cluster in a box."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from box import INTERFACE, Box
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import PrismscaleError
from prismscale.processes.children import Children

PORT = 29_500
POLL_S = 0.05
LIMIT_S = 240.0


def run_ranks(
    box: Box, name: str, program: Path, specs: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Run ``program SPEC`` on every machine, one rank of a gloo job each, to the end.

    Raises:
        PrismscaleError: a rank failed, or took longer than ``LIMIT_S``.
    """
    with Children() as children:
        for rank, spec in enumerate(specs):
            path = folder / f"{name}-{rank}.spec.json"
            path.write_text(json.dumps(spec))
            children.start(
                f"{name} {rank}",
                [*box.prefix(rank), sys.executable, str(program), str(path)],
                folder / "logs" / f"{name}-{rank}.log",
                environment=_environment(rank, len(specs)),
            )
        deadline = time.monotonic() + LIMIT_S
        while children.running:
            time.sleep(POLL_S)
            for child in children.finished():
                if child.process.returncode != 0:
                    raise PrismscaleError(f"{child.name} failed:\n{child.log_tail(30)}")
            if time.monotonic() > deadline:
                stuck = ", ".join(c.name for c in children.all_running())
                raise PrismscaleError(f"{stuck}: not done after {LIMIT_S:.0f} s")


def _environment(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun would set where every rank is a node of its own."""
    torchrun = RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_world_size=1,
        master_addr=Box.address(0),
        master_port=PORT,
    ).variables()
    # There is no agent: rank 0 serves the store itself.
    del torchrun["TORCHELASTIC_USE_AGENT_STORE"]
    return {**torchrun, "GLOO_SOCKET_IFNAME": INTERFACE}
