"""How many tokens each expert gets: an input, because routing is data that a null device lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prismscale.errors import FormatError, UsageError, shown
from prismscale.typed_files import text_of

_ALLOWED = "give uniform, zipf:S with S from 0 to 10, or a CSV file of tokens by expert"


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Relative load of experts.

    Raises :class:`UsageError` for loads below 0, that sum to 0, or an exponent out of range.
    """

    loads: tuple[float, ...] = ()
    """By expert; applies where a program counts tokens of as many experts. Empty: see exponent."""
    exponent: float = 0.0
    """Expert ``i`` (from 1) gets a share in proportion to ``i ** -exponent``; 0: all the same."""

    def __post_init__(self) -> None:
        if any(load < 0 for load in self.loads) or (self.loads and not sum(self.loads)):
            raise UsageError("--routing takes loads of at least 0 that do not sum to 0")
        if not 0 <= self.exponent <= 10:
            raise UsageError(f"--routing zipf:{self.exponent:g}; {_ALLOWED}")

    @staticmethod
    def parse(text: str) -> Routing:
        """Read ``uniform``, ``zipf:1.2``, or the CSV file of that name.

        In a file the last field of each line is an expert's load; a first line without a number is
        a header.

        Raises:
            UsageError: none of these.
            FormatError: the file has a line without a number.
        """
        name, _, exponent = text.partition(":")
        if text == "uniform":
            return Routing()
        if name == "zipf":
            try:
                return Routing(exponent=float(exponent))
            except ValueError:
                raise UsageError(f"--routing {text}; {_ALLOWED}") from None
        return Routing(loads=_read(Path(text)))


def _read(path: Path) -> tuple[float, ...]:
    try:
        lines = text_of(path).splitlines()
    except OSError as error:
        raise UsageError(f"--routing {path}: {error}; {_ALLOWED}") from error
    fields = [line.split(",")[-1].strip() for line in lines if line.strip()]
    loads = []
    for number, field in enumerate(fields, 1):
        try:
            loads.append(float(field))
        except ValueError:
            if number > 1:
                raise FormatError(
                    f"{path}: line {number} ends with no number: {shown(field)}"
                ) from None
    if not loads:
        raise FormatError(f"{path}: no loads of experts; give one line for each expert")
    return tuple(loads)
