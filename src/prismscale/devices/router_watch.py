"""Records what expert routers choose on a device that computes, and overrides it on request.

A router chooses by ``topk`` over the last dimension of its scores, which have one row per token and
one column per expert. If the run's :class:`~prismscale.devices.routing.Routing` has loads for that
number of experts, the scores are overwritten in place just before (PrismLLM, "MoE mock router").
So the program's own code chooses, weighs and dispatches. The new scores are positive and add up to
1, so they are valid before and after a softmax or sigmoid. They come from host memory that is not
torch's, so the program's allocator does not see them. The same tokens choose the same experts when
a part of the forward pass is computed again.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from prismscale.analysis.overload import MockedLine, RouterStep, RouterUse
from prismscale.devices.routing import Routing, spread
from prismscale.emulation.call_site import call_site
from prismscale.emulation.step_detection import watch_backward

MOST_EXPERTS = 4096
"""A ``topk`` over more columns does not belong to a router: it samples from a vocabulary."""
MOST_STEPS = 4
"""Number of steps, the latest ones, whose choices are kept."""
_PATTERNS = 64


class RouterWatch:
    """Records what routers choose in each step, and makes them choose as ``routing`` says."""

    def __init__(self, routing: Routing, device: str) -> None:
        """``device``: ``cpu`` or ``cuda``."""
        self._routing, self._key = routing, device.upper()
        self._is_mocked = routing != Routing()
        self._step = 0
        self._counts: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self._backward_after: dict[int, list[int]] = defaultdict(list)
        self.sites: dict[str, int] = {}
        """Number of times that scores were overwritten, by line of the program."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Intercept every ``topk`` of the device during the block."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns that its own kernel is overridden.
            warnings.simplefilter("ignore")
            library.impl("topk", self._topk, self._key)
        handle = register_optimizer_step_post_hook(lambda *_: self._step_ended())
        try:
            with watch_backward(self):
                yield
        finally:
            handle.remove()
            library._destroy()

    def backward_begins(self) -> None:
        """Note the choices so far: this backward pass, or a later one, needs them."""
        self._backward_after[self._step].append(len(self._counts[self._step]))

    def backward_ended(self) -> None:
        """Do nothing."""

    def save(self, path: Path) -> None:
        """Write the choices and the overwritten lines. Raises :class:`StorageError`."""
        steps = [
            RouterStep(counts=tuple(counts), backward_after=tuple(self._backward_after[step]))
            for step, counts in self._counts.items()
            if counts
        ]
        mocked = tuple(MockedLine(site=s, times=n) for s, n in sorted(self.sites.items()))
        RouterUse(steps=tuple(steps[-MOST_STEPS:]), mocked=mocked).save(path)

    def _topk(
        self, scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, order: bool = True
    ) -> Any:
        # ``topk.values`` is the same kernel as the one overridden. Only its outputs are allocated.
        values = scores.new_empty(0)
        indices = torch.empty(0, dtype=torch.int64, device=scores.device)
        is_router = largest and _may_be_scores(scores, k, dim)
        if is_router and self._is_mocked:
            self._overwrite(scores, k)
        chosen = torch.ops.aten.topk.values(
            scores, k, dim, largest, order, values=values, indices=indices
        )
        # Inside a backward pass a part is computed again that was counted before.
        if is_router and torch._C._current_graph_task_id() == -1:
            self._note(indices, scores.shape[-1], k)
        return chosen

    def _overwrite(self, scores: torch.Tensor, k: int) -> None:
        shares = self._routing.shares_in(self._step, scores.shape[-1])
        if shares is None:
            return
        tokens = scores.numel() // scores.shape[-1]
        key = tuple(shares.tolist()), tokens, k, scores.dtype, scores.is_cuda
        scores.copy_(_pattern(*key).view(scores.shape))
        site = call_site()
        self.sites[site] = self.sites.get(site, 0) + 1

    def _note(self, indices: torch.Tensor, experts: int, k: int) -> None:
        # On an asynchronous device, counting would make the host wait for it.
        if indices.is_cuda:
            return
        counts = np.bincount(indices.numpy().reshape(-1), minlength=experts)
        self._counts[self._step].append(tuple(counts.tolist()))

    def _step_ended(self) -> None:
        self._step += 1
        for noted in (self._counts, self._backward_after):
            noted.pop(self._step - MOST_STEPS - 1, None)


def _may_be_scores(scores: torch.Tensor, k: int, dim: int) -> bool:
    return (
        scores.dim() in (2, 3)
        and dim in (-1, scores.dim() - 1)
        and scores.is_floating_point()
        and 1 <= k < scores.shape[-1] <= MOST_EXPERTS
        and scores.numel() > 0
    )


def choices(counts: np.ndarray[Any, Any], tokens: int, k: int) -> np.ndarray[Any, Any]:
    """Return the experts of each token, shape (tokens, k).

    Expert ``e`` is chosen ``counts[e]`` times. If that exceeds the number of tokens, other experts
    get the excess. No token has an expert twice.
    """
    counts = counts.copy()
    while (over := np.maximum(counts - tokens, 0)).any():
        counts -= over
        room = np.flatnonzero(counts < tokens)
        extra = int(over.sum())
        counts[room] += extra // len(room) + (np.arange(len(room)) < extra % len(room))
    # Choices are dealt to one token after another, and an expert has at most ``tokens`` choices in
    # a row. So no token gets it twice.
    return np.repeat(np.arange(len(counts)), counts).reshape(k, tokens).T


@lru_cache(maxsize=_PATTERNS)
def _pattern(
    shares: tuple[float, ...], tokens: int, k: int, dtype: torch.dtype, pinned: bool
) -> torch.Tensor:
    """Return scores, shape (tokens, experts), by which a router chooses as ``shares`` say.

    They are not in memory of torch's allocator; with ``pinned`` they are in pinned memory, for a
    GPU.
    """
    experts = len(shares)
    chosen = choices(spread(tokens * k, np.array(shares)), tokens, k)
    scores = np.full((tokens, experts), 0.25 / experts, dtype=np.float32)
    # Earlier choices get slightly higher scores, so that their order is well defined.
    weights = np.linspace(1.1, 0.9, k, dtype=np.float32)
    np.put_along_axis(scores, chosen, 0.75 * weights / weights.sum(), axis=1)
    scores /= scores.sum(axis=1, keepdims=True)
    raw = np.empty(scores.size * dtype.itemsize, dtype=np.uint8)
    pattern = torch.from_numpy(raw).view(dtype).view(scores.shape).copy_(torch.from_numpy(scores))
    return pattern.pin_memory() if pinned else pattern
