"""What is gathered from the ranks of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prismscale.analysis.payload_use import PayloadKind, PayloadUse, PayloadUses
from prismscale.capture.capture_spec import payload_path
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from prismscale.job_parts import payload_uses
from support.traces import loop_trace


def test_payloads_do_not_depend_on_how_early_a_rank_was_found_equal(tmp_path: Path) -> None:
    """Rank 1 did what rank 0 did, and ended before it."""
    whole = PayloadUses(uses=(PayloadUse(kind=PayloadKind.MIRROR, communications=7),))
    early = PayloadUses(uses=(PayloadUse(kind=PayloadKind.MIRROR, communications=4),))
    whole.save(payload_path(tmp_path, 0))
    early.save(payload_path(tmp_path, 1))
    first = loop_trace(2, 4)
    second = replace(first, rank=1, facts=replace(first.facts, equivalent_to=0))
    config = JobConfig(
        script=Script(target=__file__), world_size=2, cluster="h100-sxm", out=tmp_path
    )
    assert payload_uses(config, tmp_path, {0: first, 1: second}) == (whole, whole)
