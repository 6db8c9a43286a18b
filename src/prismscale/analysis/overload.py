"""How unevenly experts are loaded: Megatron-LM's overload factors, of what routers chose.

Definitions (Megatron-LM, "overload factor logging"): a factor belongs to a layer and a microbatch;
it is the tokens on the fullest rank of those that experts are spread over, over an equal share.
``avg`` and ``max`` are over all of a step. ``max_cum`` follows the tokens whose activations are
kept for the backward pass: the highest such sum, over what it would be if all ranks had equal
shares.
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
    """What the routers of one rank chose in a step, in order."""

    counts: tuple[tuple[float, ...], ...]
    """Of each choice, tokens of this rank by expert."""
    backward_after: tuple[int, ...] = ()
    """Of each backward pass, how many choices came before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MockedLine:
    """A line of the program that chooses from scores which were overwritten."""

    site: str
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterUse:
    """Of one rank; a JSON file beside its trace."""

    steps: tuple[RouterStep, ...] = ()
    mocked: tuple[MockedLine, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @staticmethod
    def load(path: Path) -> RouterUse:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: not such a file.
        """
        return load_json(RouterUse, path, "what routers of a rank chose")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverloadFactors:
    """Of the last steps that were seen; see the module."""

    experts: int
    ranks: int
    """Over which they are spread."""
    steps: int
    avg: float
    max: float
    max_cum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterFindings:
    """What is known of the routers of a job's experts."""

    factors: OverloadFactors | None = None
    """None where no router was seen, or its experts are not spread over ranks."""
    mocked: tuple[MockedLine, ...] = ()
    """On all ranks that were captured."""


def findings_of(uses: Mapping[int, RouterUse], groups: Sequence[Sequence[int]]) -> RouterFindings:
    """Of all captured ranks; ``groups`` as for :func:`overload_factors`."""
    times: Counter[str] = Counter()
    for line in (line for use in uses.values() for line in use.mocked):
        times[line.site] += line.times
    mocked = tuple(MockedLine(site=site, times=n) for site, n in sorted(times.items()))
    return RouterFindings(factors=overload_factors(uses, groups), mocked=mocked)


def modelled_use(
    emulated: Emulated, shares: Callable[[int], NDArray[np.float64] | None]
) -> RouterUse:
    """What routers choose on a device that is not there: what was assumed of as many experts as
    each ``topk`` of a step has columns."""
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
    """The factors of a job.

    Args:
        uses: by rank that was seen. A rank that was not sends what another of its group does.
        groups: ranks over which experts are spread, each with its members in order.

    Returns:
        None where no router was seen, or experts do not fit the groups.
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
    """Tokens that each rank of a group has, by choice, and the number of experts."""
    n = min(len(step.counts) for step in seen)
    experts = len(seen[0].counts[0]) if n else 0
    sizes = {len(counts) for step in seen for counts in step.counts}
    if not n or sizes != {experts} or experts % ranks:
        return None
    counts_SNE = np.array([step.counts[:n] for step in seen], dtype=np.float64)
    # Those that were not seen send what those that were do on average.
    counts_NE = counts_SNE.mean(axis=0) * ranks
    return counts_NE.reshape(n, ranks, experts // ranks).sum(axis=2), experts


def _cumulated(
    tokens_NR: NDArray[np.float64], balanced_N: NDArray[np.float64], backward_after: Sequence[int]
) -> float:
    """Peak of what is kept for backward passes, over the peak of equal shares, on the fullest rank.

    Each pass gives back as many choices as every other: those of the microbatch that is oldest.
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
