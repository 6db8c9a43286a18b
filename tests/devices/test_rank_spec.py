"""What the processes of captured and live ranks are told: kept in a file, and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.devices.rank_spec import RankSpec
from prismscale.errors import FormatError, UsageError
from prismscale.live.live_spec import LiveSpec

OF_ANY: dict[str, Any] = {
    "rank": 1,
    "world_size": 4,
    "local_world_size": 4,
    "target": "train.py",
    "is_module": False,
    "args": ("--a", "1"),
    "device": "cpu",
    "step_marker": None,
    "communication_load": False,
    "payloads": "payloads",
    "out": "out",
}
CAPTURED = CaptureSpec(**OF_ANY, samples=2, track_memory=False, slice=(0, 1))
LIVE = LiveSpec(
    **OF_ANY, steps=2, clock="paced", live=(0, 1), trace="", exchange="", socket="", hang_step=3
)
each_kind = pytest.mark.parametrize("spec", [CAPTURED, LIVE], ids=lambda spec: spec.WHAT)


@each_kind
def test_a_spec_survives_its_file(spec: RankSpec, tmp_path: Path) -> None:
    """Lists become tuples again."""
    spec.save(tmp_path / "spec.json")
    assert type(spec).load(tmp_path / "spec.json") == spec


@each_kind
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"args": 1, "live": 2}'])
def test_a_file_that_is_no_spec_is_refused(spec: RankSpec, tmp_path: Path, text: str) -> None:
    """Named, whatever is in it."""
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=rf"spec\.json does not describe a {spec.WHAT}"):
        type(spec).load(path)


@pytest.mark.parametrize(
    ("spec", "change", "allowed"),
    [
        (CAPTURED, {"samples": 0}, "at least 1 step"),
        (CAPTURED, {"device": "abacus"}, "allowed: cpu, cuda, null"),
        (LIVE, {"clock": "sundial"}, "allowed: paced, virtual"),
    ],
)
def test_what_cannot_be_is_refused(spec: RankSpec, change: dict[str, Any], allowed: str) -> None:
    """A measurement of nothing, a device or a clock that does not exist: with those that do."""
    with pytest.raises(UsageError, match=allowed):
        replace(spec, **change)
