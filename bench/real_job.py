"""A real gloo job, each of whose ranks has a core of its own and runs ``real_rank.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.processes.children import Children
from starters import on_core


def _store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@dataclass(kw_only=True)
class RealJob:
    """A team of ranks on one node, in a folder that it may share with others."""

    team: str
    folder: Path
    store: TCPStore = field(default_factory=_store)
    """Through which the ranks find each other. As torchrun's it is not theirs: nobody else can take
    its port, and it outlives them."""

    def start(
        self, children: Children, specs: Sequence[Mapping[str, Any]], extra: Mapping[str, str]
    ) -> None:
        """Start a rank for each of ``specs``, in the environment that torchrun would give it, and
        with ``extra`` variables."""
        for rank, spec in enumerate(specs):
            path = self.folder / f"{self.team}-{rank}.spec.json"
            path.write_text(json.dumps({**spec, "team": self.team, "out": str(self.folder)}))
            torchrun = RankEnvironment(
                rank=rank,
                world_size=len(specs),
                local_world_size=len(specs),
                master_port=self.store.port,
            ).variables()
            program = Path(__file__).with_name("real_rank.py")
            children.start(
                f"{self.team} {rank}",
                [*on_core(rank), sys.executable, str(program), str(path)],
                self.folder / "logs" / f"{self.team}-{rank}.log",
                environment={**torchrun, "GLOO_SOCKET_IFNAME": "lo", **extra},
            )

    def told(self, rank: int) -> dict[str, Any]:
        """What a rank that has ended saw of its steps and memory."""
        found: dict[str, Any] = json.loads((self.folder / f"{self.team}-{rank}.json").read_text())
        return found
