"""Whether two ranks run one program: waits for room in a launch queue tell nothing."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.launch_paths import LAUNCH_SUFFIX
from prismscale.graph.likeness import program_fingerprint, waits_for_room
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace

SPANS = 6


def issuing(waits: dict[int, Sequence[int]], *, is_modelled: bool = True) -> RankTrace:
    """A host that issues spans of kernels, each with its launch path beside it and an all-reduce
    after it. ``waits``: by span, the spans for whose end the host waits before it issues it, below
    0 those of the step before."""
    builder = TraceBuilder(rank=0, world_size=2)
    builder.begin_body()
    _spans(builder, waits)
    return builder.build(facts=CaptureFacts(modelled=is_modelled))


def _spans(builder: TraceBuilder, waits: dict[int, Sequence[int]]) -> None:
    first = len(builder)
    host: list[int] = []
    done: list[int] = []
    for span in range(SPANS):
        # Work and launch path are the second and the third node of each span.
        old = [first + 4 * before + place for before in waits.get(span, ()) for place in (1, 2)]
        host.append(builder.add_compute(1, preds=[*host[-1:], *old]))
        work = builder.add_compute(5, preds=done[-1:], lane="stream 0")
        launch = builder.add_compute(
            2, preds=[*host[-2:-1], *old], label=f"span{LAUNCH_SUFFIX}", lane="stream 0"
        )
        done.append(
            builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[work, launch], lane="nccl")
        )


def test_a_wait_for_older_work_tells_no_program_from_another() -> None:
    """Two spans ago, or three: the same program; exact hashes differ."""
    earlier, later = issuing({4: [1]}), issuing({5: [2]})
    assert earlier.fingerprint() != later.fingerprint()
    assert program_fingerprint(earlier) == program_fingerprint(later)
    assert program_fingerprint(earlier) == program_fingerprint(issuing({}))


def test_a_wait_for_the_latest_work_is_the_programs_own() -> None:
    """As where it reads its loss."""
    assert program_fingerprint(issuing({5: [4]})) != program_fingerprint(issuing({}))


def beginning(*, spans: int = 1, n_bytes: int = 8, is_modelled: bool = True) -> RankTrace:
    """A rank that computes ``spans`` and communicates once, before it makes equal steps."""
    builder = TraceBuilder(rank=0, world_size=2)
    for _ in range(spans):
        builder.add_compute(1, preds=[])
    builder.add_communication(CollectiveOp.BROADCAST, n_bytes, preds=[], lane="nccl")
    builder.begin_body()
    _spans(builder, {})
    return builder.build(facts=CaptureFacts(modelled=is_modelled))


def test_what_a_rank_computes_before_its_steps_tells_nothing() -> None:
    """Its compiler's caches were warm; where time is measured, all of it counts."""
    assert program_fingerprint(beginning(spans=1)) == program_fingerprint(beginning(spans=4))
    cold, warm = beginning(spans=4, is_modelled=False), beginning(is_modelled=False)
    assert program_fingerprint(cold) != program_fingerprint(warm)


def test_what_a_rank_communicates_before_its_steps_tells_programs_apart() -> None:
    """A broadcast of another size."""
    assert program_fingerprint(beginning()) != program_fingerprint(beginning(n_bytes=16))


def test_waits_for_the_step_before_count_its_spans() -> None:
    """The last span of it is the latest work of a step's first span; those before are older."""
    assert not waits_for_room(issuing({0: [-1]})).any()
    assert waits_for_room(issuing({0: [-2]})).sum() == 4
    assert waits_for_room(issuing({1: [-1]})).sum() == 4


def test_where_time_is_measured_every_edge_counts() -> None:
    """No queue is modelled there."""
    assert not waits_for_room(issuing({4: [1]}, is_modelled=False)).any()


def test_all_else_tells_programs_apart() -> None:
    """An operation, whatever the host waits for."""
    one, other = TraceBuilder(rank=0, world_size=2), TraceBuilder(rank=1, world_size=2)
    for builder, op in ((one, CollectiveOp.ALL_REDUCE), (other, CollectiveOp.BROADCAST)):
        builder.begin_body()
        builder.add_communication(op, 8)
    assert program_fingerprint(one.build()) != program_fingerprint(other.build())
