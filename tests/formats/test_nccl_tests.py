"""Reading nccl-tests output of several versions and launchers."""

from __future__ import annotations

import pytest

from prismscale.errors import FormatError
from prismscale.formats.nccl_tests import measured_from, parse_nccl_tests
from prismscale.graph.node import CollectiveOp

HEADER = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6733 on node-b device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place          in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time …
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us) …
"""
ROWS = """\
       8       2  float  sum  -1  13.67   0.00   0.00  0  13.50   0.00   0.00    0
 1048576  262144  float  sum  -1  27.37  38.31  38.31  0  27.01  38.82  38.82  N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 19.1
"""


def test_both_blocks_of_a_row_are_read() -> None:
    """Out-of-place first, in-place second, with the header's operation and ranks."""
    rows = parse_nccl_tests(HEADER + ROWS)

    assert [(r.n_bytes, r.in_place, r.time_us) for r in rows] == [
        (8, False, 13.67), (8, True, 13.5), (1048576, False, 27.37), (1048576, True, 27.01)
    ]  # fmt: skip
    assert {(r.op, r.n_ranks, r.n_nodes) for r in rows} == {(CollectiveOp.ALL_REDUCE, 2, 2)}
    assert (rows[2].algbw_gbps, rows[2].n_wrong, rows[3].n_wrong) == (38.31, 0, None)


@pytest.mark.parametrize(
    "row",
    [
        "1024 256 float none -1 17.1 0.06 0.05 0 17.2 0.06 0.05 0",
        "1024 256 float sum 17.1 0.06 0.05 0e+00 17.2 0.06 0.05 0e+00",
        "1024 256 float 17.1 0.06 0.05 N/A 17.2 0.06 0.05 N/A",
        "1024 256 double sum -1 17.1 0.06 0.05 0",
        "[1,0]<stdout>:   1024 256 float sum -1 17.1 0.06 0.05 0 17.2 0.06 0.05 0",
        "worker-0: 1024 256 float sum -1 17.1 0.06 0.05 0 17.2 0.06 0.05 0",
        "0: 1024 256 float sum -1 17.1 0.06 0.05 0 17.2 0.06 0.05 0",
    ],
)
def test_columns_and_launcher_tags_may_vary(row: str) -> None:
    """Versions and launchers differ; the figures are the same."""
    first = parse_nccl_tests(row, op=CollectiveOp.REDUCE_SCATTER)[0]

    assert (first.n_bytes, first.time_us, first.busbw_gbps) == (1024, 17.1, 0.05)


def test_runs_that_follow_each_other_keep_their_own_operation_and_ranks() -> None:
    """Logs of several programs are often one file."""
    second = (
        "./build/alltoall_perf -b 8 -e 8\n#  Rank  0 Group  0 Pid 1 on node-a device 0 [04] X\n"
        "8 1 float none -1 20.0 0.0 0.0 0\n"
    )

    rows = parse_nccl_tests(HEADER + ROWS + second)

    assert (rows[-1].op, rows[-1].n_ranks) == (CollectiveOp.ALL_TO_ALL, 1)


def test_text_without_rows_is_refused() -> None:
    """A log of a failed run is not an empty measurement."""
    with pytest.raises(FormatError, match="no nccl-tests rows found"):
        parse_nccl_tests(
            HEADER + "node-a: Test NCCL failure common.cu:958 'unhandled system error'"
        )


def test_rows_without_a_program_name_need_the_operation() -> None:
    """The table itself does not say what it measures."""
    with pytest.raises(FormatError, match="does not name its program"):
        parse_nccl_tests(ROWS)


def test_rows_become_curves_of_a_cluster_file() -> None:
    """Out-of-place times, by operation, ranks and nodes."""
    (curve,) = measured_from(parse_nccl_tests(HEADER + ROWS), machine="m", date="d").curves

    assert (curve.op, curve.group_size, curve.nodes) == (CollectiveOp.ALL_REDUCE, 2, 2)
    assert (curve.n_bytes, curve.time_ns) == ((8, 1048576), (13670, 27370))


def test_curves_need_the_number_of_ranks() -> None:
    """A time means nothing without its group size."""
    rows = parse_nccl_tests(ROWS, op=CollectiveOp.ALL_REDUCE)

    with pytest.raises(FormatError, match="does not list its ranks"):
        measured_from(rows, machine="m", date="d")
