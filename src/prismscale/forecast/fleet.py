"""How often machines fail: published failure rates of fleets, by component.

A fleet is a TOML file, of this package (``forecast/fleets/*.toml``) or of the user. Rates are
interruptions of training per node and day, so a job's rate grows with its number of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from prismscale.errors import UsageError, did_you_mean
from prismscale.typed_files import decode, parse, read

_PACKAGE = ("prismscale.forecast", "fleets")
NO_FAILURES = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailingComponent:
    """Failure rate of one component."""

    per_1000_node_days: float
    replaces_node: bool = True
    """Whether the node is taken out and replaced. If not, the job only starts again."""

    def __post_init__(self) -> None:
        if not 0 <= self.per_1000_node_days <= 1e5:
            raise UsageError(
                f"per_1000_node_days is {self.per_1000_node_days}; allowed: 0 … 100,000"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """How often the nodes of a fleet fail."""

    name: str
    components: Mapping[str, FailingComponent]
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.per_1000_node_days > 0:
            raise UsageError(
                f"fleet '{self.name}' never fails; say so with --failures {NO_FAILURES}"
            )

    @property
    def per_1000_node_days(self) -> float:
        """Failures of all components together."""
        return sum(c.per_1000_node_days for c in self.components.values())

    @property
    def node_mtbf_hours(self) -> float:
        """Mean time between failures of one node."""
        return 24_000 / self.per_1000_node_days

    @property
    def replacing_share(self) -> float:
        """Share of failures after which a node is replaced."""
        replacing = (c.per_1000_node_days for c in self.components.values() if c.replaces_node)
        return sum(replacing) / self.per_1000_node_days

    @staticmethod
    def of_mtbf(hours: float) -> Fleet:
        """Return a fleet with one failure rate for everything."""
        if not hours > 0:
            raise UsageError(f"mtbf_hours is {hours}; it must be more than 0")
        rate = FailingComponent(per_1000_node_days=24_000 / hours)
        return Fleet(name=f"one failure of a node in {hours:g} hours", components={"any": rate})

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that :meth:`load` knows."""
        package, folder = _PACKAGE
        files = resources.files(package).joinpath(folder).iterdir()
        return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".toml")))

    @classmethod
    def load(cls, name_or_path: str) -> Fleet:
        """Read a preset by name, or a TOML file by path.

        Raises:
            UsageError: no such preset or file.
            FormatError: a damaged file; the message names the key.
        """
        if name_or_path in cls.presets():
            package, folder = _PACKAGE
            file = resources.files(package).joinpath(folder, f"{name_or_path}.toml")
            text = file.read_text("utf-8")
            return decode(cls, parse(text, name_or_path), f"fleet {name_or_path}")
        path = Path(name_or_path)
        if path.suffix != ".toml" and not path.is_file():
            allowed = did_you_mean(name_or_path, (*cls.presets(), NO_FAILURES))
            raise UsageError(
                f"unknown fleet '{name_or_path}'; {allowed}; or the path of a .toml file"
            )
        return decode(cls, {"name": path.stem, **read(path, "fleet")}, str(path))
