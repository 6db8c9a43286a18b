"""``prismscale calibrate nccl-tests``: figures that users bring along."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from prismscale.cli import app
from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.errors import FormatError
from prismscale.graph.node import CollectiveOp

PRINTED = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6733 on node-b device  0 [0000:04:00] NVIDIA H100 80GB HBM3
       8       2  float  sum  -1  13.67   0.00   0.00  0  13.50   0.00   0.00    0
 1048576  262144  float  sum  -1  27.37  38.31  38.31  0  27.01  38.82  38.82  N/A
"""


def test_what_nccl_tests_printed_goes_before_the_model(tmp_path: Path) -> None:
    """The written cluster answers with the measured time, and elsewhere as its preset."""
    (tmp_path / "printed.txt").write_text(PRINTED)
    out = tmp_path / "ours.toml"
    options = ["--cluster", "h100-sxm", "--out", str(out), str(tmp_path / "printed.txt")]
    done = CliRunner().invoke(app, ["calibrate", "nccl-tests", *options])
    assert done.exit_code == 0, done.output
    assert "all_reduce: 2 ranks on 2 nodes, 2 sizes" in done.output
    ours, preset = (collective_model(Cluster.load(c)) for c in (str(out), "h100-sxm"))
    pair, eight = np.array([[0], [8]]), np.arange(8)[:, None]
    call = CollectiveOp.ALL_REDUCE, 1 << 20
    assert ours.duration_ns(*call, pair).tolist() == [27_370]
    assert ours.duration_ns(*call, eight) == preset.duration_ns(*call, eight)


def test_text_without_rows_is_refused(tmp_path: Path) -> None:
    """The message shows a line as it should be."""
    path = tmp_path / "printed.txt"
    path.write_text("nothing\n")
    done = CliRunner().invoke(app, ["calibrate", "nccl-tests", "--cluster", "h100-sxm", str(path)])
    assert isinstance(done.exception, FormatError)
    assert "expected lines such as" in str(done.exception)
