"""Time of a kernel that exchanges tokens over NVLink with a few multiprocessors (DeepEP).

Such a kernel copies token by token. Each of its multiprocessors sends or receives at a rate of its
own, which is the same on an H100 and on a B200, so a few of them do not fill the links of a newer
GPU. The links are a limit too: theirs is the time of the communication, which runs beside the
kernel. The exchange takes the longer of the two.

The constants are fitted by ``tools/fit/fit_deep_ep.py`` to rows of an H100 with 4 to 12
multiprocessors. All other rows are held out: ``prismscale validate collectives`` scores them.
"""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.cost.kernel_signature import KernelCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeLaw:
    """Constants of one direction."""

    base_ns: float
    token_ns: float
    """Time of one multiprocessor for each token that the rank receives, or sends back."""
    moved_bytes_per_ns: float
    """Rate of one multiprocessor for these tokens."""
    own_bytes_per_ns: float
    """Rate for the rank's own tokens, each of which is read, or summed up, once."""

    def time_ns(self, *, moved: int, own: int, row_bytes: int, multiprocessors: int) -> float:
        """Return the time of an exchange.

        Args:
            moved: number of tokens that the rank receives, or sends back.
            own: number of the rank's own tokens.
            row_bytes: bytes of a token with its scales and weights.
            multiprocessors: number of them that the kernel occupies.
        """
        per_moved = self.token_ns + row_bytes / self.moved_bytes_per_ns
        work_ns = moved * per_moved + own * row_bytes / self.own_bytes_per_ns
        return self.base_ns + work_ns / max(multiprocessors, 1)


DISPATCH = ExchangeLaw(
    base_ns=34_040, token_ns=123.6, moved_bytes_per_ns=45.1, own_bytes_per_ns=14.05
)
COMBINE = ExchangeLaw(base_ns=52_450, token_ns=29.9, moved_bytes_per_ns=37.3, own_bytes_per_ns=8.94)


def law_of(*, combines: bool) -> ExchangeLaw:
    """Return the law of the direction: tokens come back and are summed up, or go out."""
    return COMBINE if combines else DISPATCH


def exchange_ns(call: KernelCall) -> float:
    """Return the time of a stated exchange.

    Its extents are: tokens received, own tokens, bytes of a row, multiprocessors, and 1 for a
    combine or 0 for a dispatch.
    """
    moved, own, row_bytes, multiprocessors, is_combine = call.arguments["extents"]
    law = law_of(combines=bool(is_combine))
    return law.time_ns(moved=moved, own=own, row_bytes=row_bytes, multiprocessors=multiprocessors)
