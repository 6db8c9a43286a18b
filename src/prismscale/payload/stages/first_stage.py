"""A note that the rank with a pipeline's first stage leaves for the ranks of other stages.

The hidden state is the same between any two stages of a pipeline. The first stage, which alone
needs no other stage, knows it first. Its rank leaves what it sends to its successor as JSON, in a
folder that captured ranks share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prismscale.files import await_file, write_json

PATIENCE_S = 300.0
"""How long a rank waits for the rank with the first stage, captured at the same time."""
_POLL_S = 0.05


class FirstStageNote:
    """One file, written by the first rank that has something to leave."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path: Path | None = None
        self._may_come: Callable[[], bool] = lambda: True

    @contextmanager
    def shared_in(
        self, folder: Path, *, while_true: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """While the block runs, exchange the note with other ranks through ``folder``.

        :meth:`wait` waits for a missing note only as long as ``while_true`` answers True.
        """
        self._path, self._may_come = folder / self._name, while_true
        try:
            yield
        finally:
            self._path = None

    @property
    def is_shared(self) -> bool:
        """Whether ranks share a folder now."""
        return self._path is not None

    def leave(self, told: Any) -> None:
        """Write ``told``, plain data, unless a rank has written before or no folder is shared."""
        if self._path is not None and not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, told)

    def wait(self) -> Any:
        """Wait for the note and return it; None if it does not come or no folder is shared."""
        path = self._path
        if path is None or not await_file(
            path, PATIENCE_S, poll_s=_POLL_S, while_true=self._may_come
        ):
            return None
        return json.loads(path.read_text())
