"""Recording on a device with streams, without a GPU."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.devices.stream_device import MAX_OPEN_MARKS, EventTimes
from prismscale.graph.node import CollectiveOp
from support.logical_streams import Event, LogicalStreams
from support.streamed_program import (
    MS,
    OTHER,
    US,
    WORLD,
    ancestors,
    communications,
    recording,
    spans,
)


class TestRecording:
    def test_spans_last_what_the_device_took(self) -> None:
        """Each span is as long as the kernels in it; filling outputs is in none."""
        with recording() as (program, recorder, device, _):
            program.work(3 * MS)
            program.communicate(sync=True)
            program.work(2 * MS)
            work = program.communicate()
            program.work(5 * MS)
            work.wait()
            program.work(MS)
        assert [ns for _, ns in spans(recorder, device)] == [3 * MS, 2 * MS, 5 * MS, MS]

    def test_communication_overlaps_what_does_not_wait_for_it(self) -> None:
        """The computation between issue and wait is no successor of the communication."""
        with recording() as (program, recorder, _, _):
            program.work(MS)
            work = program.communicate()
            program.work(MS)
            work.wait()
            program.work(MS)
        nodes = recorder.stream.nodes
        (issued,) = communications(recorder)
        between, after = issued + 1, issued + 2
        assert nodes[issued].preds == (issued - 1,)
        assert issued not in ancestors(recorder, between)
        assert {issued, between} <= set(nodes[after].preds)

    def test_outputs_are_filled_on_a_stream_of_their_own_after_the_current_one(self) -> None:
        """The fill begins when the program's stream reaches the issue, and delays nobody."""
        with recording() as (program, _, _, payload):
            program.work(3 * MS)
            program.communicate()
            program.work(MS)
        ((stream, began),) = payload.began
        assert stream is not program.streams.home
        assert began.at_ns == 3 * MS
        assert program.streams.home.free_ns == 4 * MS

    def test_waiting_is_an_order_between_streams(self) -> None:
        """The program's stream goes on after the fill; the host's clock has not moved."""
        with recording(fill_ns=10 * MS) as (program, _, _, _):
            program.work(MS)
            program.communicate(sync=True)
            program.work(MS)
            assert program.streams.now_ns == 0
        assert program.streams.home.free_ns == 12 * MS

    def test_barrier_stops_the_host(self) -> None:
        """After a barrier the device has done all that was issued before it."""
        with recording() as (program, _, _, _):
            program.work(2 * MS)
            program.communicate(CollectiveOp.BARRIER, sync=True)
            assert program.streams.now_ns >= 2 * MS

    def test_groups_communicate_side_by_side_and_each_in_order(self) -> None:
        """Two batches of one group follow each other; another group's does not wait."""
        with recording(fill_ns=MS) as (program, _, _, payload):
            for group in (WORLD, WORLD, OTHER):
                program.communicate(group=group)
        assert [event.at_ns for _, event in payload.began] == [0, MS, 0]

    def test_edges_between_the_programs_own_streams_are_seen(self) -> None:
        """As FSDP2 unshards: copy in on one stream, gather on a second, use on the first."""
        with recording() as (program, recorder, device, _):
            streams = program.streams
            copy_in, gather = streams.create(), streams.create()
            program.work(MS)
            streams.program_waits(streams.program_records(), copy_in)
            with streams.on(copy_in):
                program.work(2 * MS)
            streams.program_waits(streams.program_records(copy_in), gather)
            with streams.on(gather):
                program.communicate(CollectiveOp.ALL_GATHER, sync=True)
                gathered = streams.program_records()
            program.work(4 * MS)
            streams.program_waits(gathered)
            program.work(8 * MS)
        assert [ns for _, ns in spans(recorder, device)] == [MS, 2 * MS, 4 * MS, 8 * MS]
        nodes = recorder.stream.nodes
        took = {device.elapsed_ns(n.began, n.ended): i for i, n in enumerate(nodes) if n.began}
        (issued,) = communications(recorder)
        assert took[2 * MS] in ancestors(recorder, issued)
        assert took[4 * MS] not in ancestors(recorder, issued)
        assert issued not in ancestors(recorder, took[4 * MS])
        assert issued in ancestors(recorder, took[8 * MS])

    def test_idle_side_stream_is_not_busy(self) -> None:
        """Between two visits a copy stream has no span, however long the host is elsewhere."""
        with recording() as (program, recorder, device, _):
            side = program.streams.create()
            for _ in range(2):
                with program.streams.on(side):
                    program.work(MS)
                program.streams.host_computes(50 * MS)
        lanes = [lane for lane, _ in spans(recorder, device)]
        assert lanes == ["stream 1", "stream 1", "stream 0"]
        assert spans(recorder, device)[:2] == [("stream 1", MS)] * 2

    def test_home_stream_waits_for_the_host_within_its_spans(self) -> None:
        """A step that is bound by the host takes the host's time."""
        with recording() as (program, recorder, device, _):
            program.work(MS)
            program.streams.host_computes(7 * MS)
            program.work(MS)
        assert spans(recorder, device) == [("stream 0", 8 * MS)]

    def test_events_are_let_go_while_the_program_runs(self) -> None:
        """A long run holds a bounded number of events, and its spans stay exact."""
        with recording(fill_ns=0) as (program, recorder, device, _):
            for _ in range(MAX_OPEN_MARKS):
                program.work(US)
                program.communicate(sync=True)
                program.streams.host_computes(2 * US)
            held = {n.began.event for n in recorder.stream.nodes if n.began} - {None}
            assert len(held) <= MAX_OPEN_MARKS
        assert {ns for _, ns in spans(recorder, device)} == {US, 2 * US}

    def test_tensors_are_held_until_somebody_waits(self) -> None:
        """An input that the program drops while its communication is in flight lives on."""
        with recording(fill_ns=MS) as (program, _, device, _):
            work = program.communicate()
            flight = device._communication._flights[-1]
            assert not flight.is_over
            work.wait()
            assert flight.is_over


@settings(deadline=None)
@given(st.lists(st.integers(0, 2 * 10**9), min_size=1, max_size=30))
def test_event_times_add_up_over_any_distance(gaps: list[int]) -> None:
    """Times of events, with moving anchors, are the sums of the gaps between them."""
    streams = LogicalStreams()
    times = EventTimes(streams)
    events = [Event(int(at)) for at in np.cumsum(gaps)]
    assert [times.ns(e) for e in events] == [e.at_ns - events[0].at_ns for e in events]
