"""What live ranks of a job saw, for benches that hold it against a real job's ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from prismscale.analysis.observation import Observation
from prismscale.api import perform
from prismscale.config import JobConfig
from prismscale.processes.starter import Starter
from prismscale.runfolder import RunFolder
from prismscale.typed_files import load_json


def observe(config: JobConfig, starter: Starter) -> list[Observation]:
    """Run a job with live ranks, as ``prismscale run`` does; in the order of ``config.live``.

    Raises:
        PrismscaleError: any of its kinds.
    """
    perform(config, starter=starter)
    folders = RunFolder(root=config.out).live
    paths = [path for rank in config.live for path in folders.glob(f"*/live-{rank}.json")]
    return [load_json(Observation, path, "what was seen of a live rank") for path in paths]


def with_captures_of(config: JobConfig, out: Path) -> JobConfig:
    """The same job in a run folder of its own, ``out``, which has its captures."""
    with RunFolder(root=out).opened(fresh=False):
        shutil.copytree(config.out / "captures", out / "captures", dirs_exist_ok=True)
    return replace(config, out=out)
