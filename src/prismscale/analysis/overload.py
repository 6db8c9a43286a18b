"""Megatron-LM's overload factors, which tell how unevenly routers load the experts.

Definitions (Megatron-LM, "overload factor logging"): a factor belongs to a layer and a microbatch.
It is the number of tokens on the fullest rank of the expert-parallel group, divided by an equal
share. ``avg`` and ``max`` are over all factors of a step. ``max_cum`` concerns the tokens whose
activations are kept for the backward pass: it is their highest sum on any rank, divided by the
highest sum that equal shares would give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.emulated import Emulated
from prismscale.cost.kernel_signature import parse_signature
from prismscale.typed_files import load_json, save_json

_TOPK = "aten::topk"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStep:
    """The choices of one rank's routers in one step, in order."""

    counts: tuple[tuple[float, ...], ...]
    """For each choice, this rank's tokens by expert."""
    backward_after: tuple[int, ...] = ()
    """For each backward pass, the number of choices before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MockedLine:
    """A program line whose ``topk`` chooses from overwritten scores (``--routing``)."""

    site: str
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterUse:
    """Router choices of one rank, kept as a JSON file beside its trace."""

    steps: tuple[RouterStep, ...] = ()
    mocked: tuple[MockedLine, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @staticmethod
    def load(path: Path) -> RouterUse:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: the file is damaged or of another kind.
        """
        return load_json(RouterUse, path, "what routers of a rank chose")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverloadFactors:
    """The factors of the last steps that were watched; the module defines them."""

    experts: int
    ranks: int
    """Number of ranks over which the experts are spread."""
    steps: int
    avg: float
    max: float
    max_cum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterFindings:
    """Findings about the expert routers of a job."""

    factors: OverloadFactors | None = None
    """None where no router was seen, or where experts are not spread over ranks."""
    mocked: tuple[MockedLine, ...] = ()
    """Lines of all captured ranks."""


def findings_of(uses: Mapping[int, RouterUse], groups: Sequence[Sequence[int]]) -> RouterFindings:
    """Combine all captured ranks; ``groups`` as for :func:`overload_factors`."""
    times: Counter[str] = Counter()
    for line in (line for use in uses.values() for line in use.mocked):
        times[line.site] += line.times
    mocked = tuple(MockedLine(site=site, times=n) for site, n in sorted(times.items()))
    return RouterFindings(factors=overload_factors(uses, groups), mocked=mocked)


def modelled_use(
    emulated: Emulated, shares: Callable[[int], NDArray[np.float64] | None]
) -> RouterUse:
    """Return the choices that a null device assumes, one for each ``topk`` of a step.

    ``shares`` gives the assumed share of each expert, by the number of experts, which is the number
    of columns of the scores.
    """
    counts: list[tuple[float, ...]] = []
    for use in emulated.kernels:
        if not use.signature.startswith(_TOPK):
            continue
        call = parse_signature(use.signature)
        scores, k = call.inputs[0], int(call.outputs[0].sizes[-1])
        share = shares(scores.sizes[-1]) if len(scores.sizes) in (2, 3) else None
        if share is not None and k < scores.sizes[-1]:
            total = scores.elements // scores.sizes[-1] * k
            counts += [tuple((share * total).tolist())] * use.calls
    return RouterUse(steps=(RouterStep(counts=tuple(counts)),) if counts else ())


def overload_factors(
    uses: Mapping[int, RouterUse], groups: Sequence[Sequence[int]]
) -> OverloadFactors | None:
    """Compute the overload factors of a job.

    Args:
        uses: by watched rank. Other ranks are taken to send what those of their group do.
        groups: expert-parallel groups, each with its members in order.

    Returns:
        None where no router was seen, or the number of experts does not fit the groups.
    """
    factors: list[float] = []
    cumulated: list[float] = []
    seen_steps, experts = 0, 0
    for group in groups:
        seen = [uses[r].steps for r in group if r in uses and uses[r].steps]
        if not seen:
            continue
        for step in range(min(map(len, seen))):
            entries = _tokens_on_ranks([steps[step] for steps in seen], len(group))
            if entries is None:
                return None
            tokens_NR, experts = entries
            balanced_N = tokens_NR.mean(axis=1)
            factors += (tokens_NR.max(axis=1) / balanced_N).tolist()
            cumulated.append(_cumulated(tokens_NR, balanced_N, seen[0][step].backward_after))
        seen_steps = max(seen_steps, min(map(len, seen)))
    if not factors:
        return None
    return OverloadFactors(
        experts=experts,
        ranks=max(map(len, groups)),
        steps=seen_steps,
        avg=float(np.mean(factors)),
        max=max(factors),
        max_cum=max(cumulated),
    )


def _tokens_on_ranks(
    seen: Sequence[RouterStep], ranks: int
) -> tuple[NDArray[np.float64], int] | None:
    """Return the tokens on each rank of a group, by choice, and the number of experts."""
    n = min(len(step.counts) for step in seen)
    experts = len(seen[0].counts[0]) if n else 0
    sizes = {len(counts) for step in seen for counts in step.counts}
    if not n or sizes != {experts} or experts % ranks:
        return None
    counts_SNE = np.array([step.counts[:n] for step in seen], dtype=np.float64)
    # Ranks that were not watched send what watched ranks send on average.
    counts_NE = counts_SNE.mean(axis=0) * ranks
    return counts_NE.reshape(n, ranks, experts // ranks).sum(axis=2), experts


def _cumulated(
    tokens_NR: NDArray[np.float64], balanced_N: NDArray[np.float64], backward_after: Sequence[int]
) -> float:
    """Return the fullest rank's peak of tokens kept for backward passes, over that of equal shares.

    Every backward pass releases the same number of choices: those of the oldest microbatch.
    """
    n, passes = len(tokens_NR), max(len(backward_after), 1)
    ends = [n * (i + 1) // passes for i in range(passes)]
    upto_NR = np.vstack([np.zeros(tokens_NR.shape[1]), tokens_NR.cumsum(axis=0)])
    upto_N = np.concatenate([[0.0], balanced_N.cumsum()])
    peaks = np.zeros(tokens_NR.shape[1])
    equal = 0.0
    for i, after in enumerate(backward_after or [n]):
        freed, kept = (ends[i - 1] if i else 0), min(after, n)
        peaks = np.maximum(peaks, upto_NR[kept] - upto_NR[freed])
        equal = max(equal, float(upto_N[kept] - upto_N[freed]))
    return float(peaks.max() / equal) if equal else 1.0
