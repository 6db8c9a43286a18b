"""Megatron-LM's repository: when a record's values were measured, and the program that gave them.

A record is written anew when its test no longer agrees with it, so the newest file holds values of
years. What ran was the code of the commit that brought these values, with the options that the test
had then, in a container with the Transformer Engine that this commit names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

SAMPLE = 20
"""Values to compare: later ones may be left out of a newer file."""
PEAKS = "mem-max-allocated-bytes"
_LOCKED = re.compile(r'name = "transformer-engine"\nversion = "([\d.]+(?:post\d+)?)')
_OF_REVISION = re.compile(r"ARG TE_COMMIT=(\w+)")
_REVISIONS = {
    "bee4649c15a79ffcb9689ca7c0c963f5febaa28a": "2.2.0",
    "8382eed6cccb1eb0602c96afc1cfbc707468257f": "2.5.0",
}
"""Of Transformer Engine, by build_tools/VERSION.txt there: containers before there was a lock."""
_DOCKERFILES = ("docker/Dockerfile.ci.dev", "Dockerfile.ci.dev")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a record's values come from."""

    commit: str
    config: str
    """Text of the test's ``model_config.yaml``."""
    transformer_engine: str
    """Version, as the package index has it."""
    cluster: str
    """Preset of the GPUs that gave the values: a file that was renamed may be an A100's."""


class Repository:
    """A clone of NVIDIA/Megatron-LM with its history; no work tree is needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def origin(self, golden: str, peaks: Mapping[str, float]) -> Origin:
        """Of the values ``peaks`` of the file ``golden``, a path in the newest commit.

        Raises:
            LookupError: no commit has these values.
        """
        found = None
        for commit, path in self._history(golden):
            if _same(self._peaks(commit, path), peaks):
                found = commit, path
            elif found:
                break
        if found is None:
            raise LookupError(f"no commit of {self._path} has the values of {golden}")
        commit, path = found
        return Origin(
            commit=commit,
            config=self._show(commit, str(Path(path).with_name("model_config.yaml"))),
            transformer_engine=self._transformer_engine(commit),
            cluster="a100-80g" if "_a100_" in Path(path).name else "h100-sxm",
        )

    def checkout(self, commit: str, folder: Path) -> Path:
        """The tree of ``commit`` within ``folder``, with its data sets' helper compiled."""
        tree = folder / commit[:12]
        if not tree.exists():
            archive = self._git("archive", commit)
            partial = tree.with_suffix(".part")
            with tarfile.open(fileobj=BytesIO(archive)) as tar:
                tar.extractall(partial, filter="data")
            partial.rename(tree)
        _compile_helpers(tree / "megatron" / "core" / "datasets", folder)
        return tree

    def _history(self, golden: str) -> Iterator[tuple[str, str]]:
        """Commits that changed the file, newest first, with its name in each."""
        names = ("log", "--format=%H", "--follow", "--name-only", "--", golden)
        lines = [line for line in self._git(*names).decode().splitlines() if line]
        yield from zip(lines[::2], lines[1::2], strict=True)

    def _peaks(self, commit: str, path: str) -> dict[str, float]:
        try:
            values = json.loads(self._show(commit, path)).get(PEAKS, {}).get("values", {})
        except ValueError:
            return {}  # an earlier format
        return dict(values)

    def _transformer_engine(self, commit: str) -> str:
        locked = _LOCKED.findall(self._show(commit, "uv.lock"))
        if locked:
            return str(locked[0]).rstrip(".")
        texts = (self._show(commit, name) for name in _DOCKERFILES)
        revision = next(found[1] for text in texts if (found := _OF_REVISION.search(text)))
        return _REVISIONS[revision]

    def _show(self, commit: str, path: str) -> str:
        """Text of a file; empty where the commit has none."""
        command = ["git", "-C", str(self._path), "show", f"{commit}:{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def _git(self, *arguments: str) -> bytes:
        command = ["git", "-C", str(self._path), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout


def build_environment() -> dict[str, str]:
    """Variables with which Megatron-LM's own ``make`` builds for this Python: it asks the python3
    that comes first, and a python3-config that may be another's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "MAKEFLAGS": f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"}


def _compile_helpers(sources: Path, folder: Path) -> None:
    """Once for all trees in ``folder`` whose sources are the same."""
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    digest = hashlib.sha256((sources / "helpers.cpp").read_bytes()).hexdigest()[:12]
    compiled = folder / f"{digest}-{name}"
    if not compiled.exists():
        environment = os.environ | build_environment()
        subprocess.run(["make", "-s", "-C", str(sources)], env=environment, check=True)
        shutil.copy(sources / name, compiled)
    elif not (sources / name).exists():
        shutil.copy(compiled, sources / name)


def _same(found: Mapping[str, float], peaks: Mapping[str, float]) -> bool:
    first = list(peaks.items())[:SAMPLE]
    return bool(found) and all(found.get(step) == peak for step, peak in first)


def transformer_engine(version: str, folder: Path) -> Path:
    """The Python code of ``version``, installed into a folder of its own within ``folder``."""
    target = folder / version
    if not target.exists():
        package = f"transformer-engine=={version}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(target), package], check=True)
    return target
