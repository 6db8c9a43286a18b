"""``--routing``: how many tokens each expert gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prismscale.devices.balance import statistics
from prismscale.devices.routing import Routing, spread
from prismscale.devices.routing_text import parse_routing
from prismscale.errors import FormatError, PrismscaleError, UsageError


def test_rules_and_files_are_read(tmp_path: Path) -> None:
    """Uniform, a power of the expert's number, or loads by expert with or without a header."""
    assert parse_routing("uniform") == Routing()
    assert parse_routing("zipf:1.2") == Routing(exponent=1.2)
    path = tmp_path / "experts.csv"
    path.write_text("expert,tokens\n0,100\n1,300\n\n")
    assert parse_routing(str(path)).loads == ((100.0, 300.0),)
    path.write_text("5\n5\n")
    assert parse_routing(str(path)).loads == ((5.0, 5.0),)


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (None, UsageError, "zipf:S with S from 0 to 10"),
        ("expert,tokens\n", FormatError, "one line for each expert"),
        ("1\ntwo\n", FormatError, "line 2 ends with no number"),
        ("0\n0\n", UsageError, "do not sum to 0"),
        ("-1\n2\n", UsageError, "at least 0"),
    ],
)
def test_a_bad_file_says_what_is_allowed(
    tmp_path: Path, content: str | None, kind: type[PrismscaleError], said: str
) -> None:
    """Missing, empty, without numbers, without tokens."""
    path = tmp_path / "experts.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(kind, match=said):
        parse_routing(str(path))


@pytest.mark.parametrize("text", ["zipf:", "zipf:x", "zipf:-1", "zipf:11"])
def test_a_bad_exponent_says_what_is_allowed(text: str) -> None:
    """A number from 0 to 10."""
    with pytest.raises(UsageError, match="zipf:S with S from 0 to 10"):
        parse_routing(text)


@pytest.mark.parametrize(
    "text", ["moderate", "moderate:", "extreme:2", "balance:max=2", "balance:ranks=4,most=2"]
)
def test_a_bad_preset_says_what_is_allowed(text: str) -> None:
    """So many ranks, as many as the preset's imbalance takes, and statistics by their names."""
    with pytest.raises(UsageError, match=r"ranks|one of"):
        parse_routing(text)


@pytest.mark.parametrize(("name", "ratio"), [("balanced", 1), ("moderate", 1.5), ("extreme", 3)])
def test_the_fullest_rank_of_a_preset_has_its_ratio(name: str, ratio: float) -> None:
    """It is the first; the ranks together have what they would have of equal shares."""
    (loads,) = parse_routing(f"{name}:8").loads
    assert loads[0] == max(loads) == pytest.approx(ratio)
    assert sum(loads) == pytest.approx(8)


def test_statistics_become_loads_that_have_them(tmp_path: Path) -> None:
    """A line for each step; what is not given is free, and as even as the rest allows."""
    path = tmp_path / "balance.csv"
    path.write_text(
        "step,ranks,min,max,avg,std,median,skew\n0,8,0.6,1.5,1,0.25,0.95,0.5\n1,8,,2,,,,\n"
    )
    routing = parse_routing(str(path))
    first, second = map(np.array, routing.loads)
    found = statistics(first)
    asked = {"min": 0.6, "max": 1.5, "avg": 1, "std": 0.25, "median": 0.95, "skew": 0.5}
    assert found == pytest.approx(asked, abs=0.02)
    assert second[0] == pytest.approx(2)
    assert second[1:] == pytest.approx(np.full(7, 6 / 7), abs=0.02)


def test_statistics_that_no_loads_have_are_refused() -> None:
    """With the nearest ones."""
    with pytest.raises(UsageError, match=r"no loads of 8 ranks have std 0\.9"):
        parse_routing("balance:ranks=8,max=1.5,std=0.9")


def test_a_table_has_loads_by_step(tmp_path: Path) -> None:
    """After the last step the first comes again; every step has every expert."""
    path = tmp_path / "table.csv"
    path.write_text("step,expert,tokens\n7,0,3\n7,1,1\n8,1,1\n8,0,1\n")
    routing = parse_routing(str(path))
    shares = [routing.shares_in(step, 2) for step in range(3)]
    assert [s.tolist() for s in shares if s is not None] == [[0.75, 0.25], [0.5, 0.5], [0.75, 0.25]]
    assert routing.shares_in(0, 3) is None
    path.write_text("step,expert,tokens\n7,0,3\n7,1,1\n8,1,1\n")
    with pytest.raises(FormatError, match="every step needs each from 0 to 1 once"):
        parse_routing(str(path))


def test_loads_of_ranks_are_shared_by_their_experts() -> None:
    """Where a multiple of as many experts is spread over them."""
    routing = Routing(loads=((3.0, 1.0),), of_ranks=True)
    shares = routing.shares_in(0, 4)
    assert shares is not None
    assert shares.tolist() == [0.375, 0.375, 0.125, 0.125]
    assert spread(10, shares).tolist() == [4, 4, 1, 1]
    assert routing.shares_in(0, 3) is None
