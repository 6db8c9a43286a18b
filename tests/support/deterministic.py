"""Programs that ask torch for deterministic algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """Ask for them inside; afterwards torch is as before, filled memory included."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[assignment]
