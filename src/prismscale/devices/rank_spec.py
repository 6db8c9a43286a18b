"""Instructions for the process of a captured or live rank.

They are a JSON file, because nothing is pickled between processes.
"""

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
    """One rank of a job: its program, its device and its stand-ins for the rest of the job."""

    WHAT = "rank"
    """Name in error messages for what such a file describes."""
    PROCESS = ""
    """Module that the rank's process runs; its argument is the file's path."""

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
    """Folder for the files that the rank writes."""
    payload: PayloadKind = PayloadKind.RECORDED
    """The first source of what absent peers contribute."""
    rules: str = ""
    """File of the user's rules for payloads; empty for none."""
    gpu: Device | None = None
    """GPU that a null device stands for."""
    devices_per_domain: int = 0
    """Number of ranks that reach each other over NVLink; 0: those of a node."""
    kernels: str = ""
    """File of measured kernel times that take precedence over a null device's kernel model; empty
    for none."""
    fused: bool = False
    """Whether a null device models elementwise work as torch.compile fuses it."""
    routing: Routing = field(default_factory=Routing)
    """Tokens by expert. On a device that computes, the default leaves the program's own routing."""
    stand_ins: tuple[StandInFile, ...] = ()
    """Files that a null device imports in place of CUDA binaries."""
    trusts_objects: bool = False
    """Whether everything that an object collective brings is unpickled: see
    :mod:`prismscale.payload.object_marks`."""
    storage_bytes_per_s: float = WRITE_BYTES_PER_S
    """Bytes of a checkpoint that a rank on a null device writes in a second."""

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
        """Let a Python program that replaces this process during the block start as this rank too.

        Args:
            path: file with the new program's instructions, written when it starts.
            known: fields that have other values by now.
        """

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
            FormatError: the file is not of this kind.
        """
        return load_json(cls, path, f"a {cls.WHAT}")
