"""What the process of any rank, captured or live, is told: a JSON file, because nothing is pickled
between processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from prismscale.analysis.payload_use import PayloadKind
from prismscale.cluster import Device
from prismscale.devices.routing import Routing
from prismscale.devices.stand_in_file import StandInFile
from prismscale.devices.storage import WRITE_BYTES_PER_S
from prismscale.emulation.script import Script
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.processes.replaced_program import followed_when_replaced, split_options
from prismscale.typed_files import load_json, save_json


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """One rank of a job: its program and what stands in for the rest."""

    WHAT = "rank"
    """What such a file describes, in errors."""
    PROCESS = ""
    """The module that its process runs, with the file's path."""

    rank: int
    world_size: int
    local_world_size: int
    target: str
    is_module: bool
    args: tuple[str, ...]
    device: str
    step_marker: str | None
    communication_load: bool
    """Do this rank's share of communication work on the local cores."""
    payloads: str
    """Folder of recorded payloads, shared by all ranks of a job."""
    out: str
    """Folder for what the rank leaves."""
    payload: PayloadKind = PayloadKind.RECORDED
    """The first source of what absent peers contribute."""
    rules: str = ""
    """File of the user's rules for it; empty for none."""
    gpu: Device | None = None
    """What a null device pretends to be."""
    devices_per_domain: int = 0
    """Ranks that reach each other over NVLink; 0: those of a node."""
    kernels: str = ""
    """File of measured kernel times that go before a null device's model; empty for none."""
    fused: bool = False
    """A null device models elementwise work as torch.compile fuses it."""
    routing: Routing = field(default_factory=Routing)
    """Tokens by expert; on a device that computes, where it is given."""
    stand_ins: tuple[StandInFile, ...] = ()
    """What a null device imports in place of CUDA binaries."""
    trusts_objects: bool = False
    """Whatever an object collective brings is unpickled: see
    :mod:`prismscale.payload.object_marks`."""
    storage_bytes_per_s: float = WRITE_BYTES_PER_S
    """What a rank on a null device writes of a checkpoint in a second."""

    @property
    def script(self) -> Script:
        """The program."""
        return Script(target=self.target, args=self.args, is_module=self.is_module)

    @property
    def environment(self) -> RankEnvironment:
        """The environment variables that torchrun would set."""
        return RankEnvironment(
            rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            shares_device=self.device == "cuda",
        )

    def followed(self, path: Path, **known: Any) -> AbstractContextManager[None]:
        """Meanwhile, a Python program that takes this process's place begins as this rank, too,
        told so by the file at ``path``, with what is ``known`` by now."""

        def anew(words: Sequence[str]) -> list[str] | None:
            options, rest = split_options(words)
            script = Script.of_words(rest)
            if script is None:
                return None
            target, is_module, args = script.target, script.is_module, script.args
            replace(self, target=target, is_module=is_module, args=args, **known).save(path)
            return [*options, "-m", self.PROCESS, str(path)]

        return followed_when_replaced(anew)

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: not such a file.
        """
        return load_json(cls, path, f"a {cls.WHAT}")
