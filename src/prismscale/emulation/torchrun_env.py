"""The environment that ``torchrun`` gives one rank, for any rank of any world size.

Source: ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` (worker environment) and
``torch/distributed/run.py`` (``OMP_NUM_THREADS``).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prismscale.errors import UsageError
from prismscale.processes.variables import variables_set

_MAX_PORT = 65_535
UNREPORTED = {"WANDB_MODE": "disabled"}
"""Variables that keep services from being told of steps that no cluster ran. The user's own
environment has priority."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """The rank and the job that the program believes it runs as.

    Raises :class:`UsageError` for a rank outside the world or a world size that does not fill
    its nodes.
    """

    rank: int
    world_size: int
    local_world_size: int = 8
    """Ranks on each node; a world smaller than one node lives on one node."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29_500
    run_id: str = "prismscale"
    """``TORCHELASTIC_RUN_ID``, torchrun's ``--rdzv-id``."""
    max_restarts: int = 0
    shares_device: bool = False
    """True if all ranks of a node share one GPU here, as device 0. Programs choose their device by
    ``LOCAL_RANK``, so it is then 0, as where each process sees one GPU only."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"world size {self.world_size} is not allowed: give 1 or more ranks")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} does not exist in a world of {self.world_size}: "
                f"ranks are 0 to {self.world_size - 1}"
            )
        if self.local_world_size < 1:
            raise UsageError(
                f"{self.local_world_size} ranks a node are not allowed: give 1 or more"
            )
        if self.world_size > self.local_world_size and self.world_size % self.local_world_size:
            raise UsageError(
                f"a world of {self.world_size} does not fill nodes of {self.local_world_size} "
                "ranks: choose a world size that is a multiple, or another number of ranks a node"
            )
        if not 0 < self.master_port <= _MAX_PORT:
            raise UsageError(f"port {self.master_port} is not allowed: give 1 to {_MAX_PORT}")

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on this rank's node."""
        return min(self.local_world_size, self.world_size)

    @property
    def local_rank(self) -> int:
        """This rank's position on its node."""
        return self.rank % self.ranks_per_node

    @property
    def node_rank(self) -> int:
        """Index of this rank's node; torchrun calls it the group rank."""
        return self.rank // self.ranks_per_node

    @property
    def n_nodes(self) -> int:
        """Number of nodes of the job."""
        return self.world_size // self.ranks_per_node

    def variables(self) -> dict[str, str]:
        """Return all variables that torchrun sets for a worker, and :data:`UNREPORTED`, by name."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": "0" if self.shares_device else str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.n_nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": os.devnull,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **{name: os.environ.get(name, value) for name, value in UNREPORTED.items()},
        }

    def applied(self) -> AbstractContextManager[None]:
        """Set the variables in ``os.environ``; restore the former values on exit."""
        return variables_set(self.variables())
