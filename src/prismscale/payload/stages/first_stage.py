"""What the rank with the first stage of a pipeline leaves for the ranks of the others.

Between two stages of one pipeline there is always the same hidden state, and the first stage, which
alone needs nobody, knows it first. It leaves what it tells its successor as JSON, in a folder that
captured ranks share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prismscale.files import await_file, write_json

PATIENCE_S = 300.0
"""How long a rank waits for the one with the first stage, which is captured at the same time."""
_POLL_S = 0.05


class FirstStageNote:
    """One file, which the first rank that has something to tell writes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path: Path | None = None
        self._may_come: Callable[[], bool] = lambda: True

    @contextmanager
    def shared_in(
        self, folder: Path, *, while_true: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Meanwhile tell other ranks, and ask them, through ``folder``; what is not there yet is
        waited for only ``while_true``."""
        self._path, self._may_come = folder / self._name, while_true
        try:
            yield
        finally:
            self._path = None

    @property
    def is_shared(self) -> bool:
        """Whether there is a folder."""
        return self._path is not None

    def leave(self, told: Any) -> None:
        """Write ``told``, plain data, unless a rank has before or nothing is shared."""
        if self._path is not None and not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, told)

    def wait(self) -> Any:
        """What was left; None where it does not come, or nothing is shared."""
        path = self._path
        if path is None or not await_file(
            path, PATIENCE_S, poll_s=_POLL_S, while_true=self._may_come
        ):
            return None
        return json.loads(path.read_text())
