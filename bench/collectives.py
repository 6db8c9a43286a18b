"""Time of a query of the collective model; its accuracy is ``prismscale validate collectives``.

python bench/collectives.py [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.graph.node import CollectiveOp
from prismscale.validation.rows import Row, finish

QUERIES = 20_000
BAR_US = 20.0


def main() -> int:
    """Print the row; exit code 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    return finish([query_row()], title="Collective model", json_path=options.json)


def query_row() -> Row:
    """Time of a repeated query for 1,024 groups of 8 ranks, laid across nodes."""
    model = AnalyticCollectiveModel(Cluster.load("h100-sxm"))
    ranks_KG = np.arange(8192).reshape(8, 1024)
    model.duration_ns(CollectiveOp.ALL_REDUCE, 2**20, ranks_KG)
    began = time.perf_counter()
    for _ in range(QUERIES):
        model.duration_ns(CollectiveOp.ALL_REDUCE, 2**20, ranks_KG)
    each_us = 1e6 * (time.perf_counter() - began) / QUERIES
    return Row.at_most("cached query, 1,024 groups of 8", each_us, BAR_US, "us")


if __name__ == "__main__":
    sys.exit(main())
