"""Public measurements of collectives: what is read, and what is held out."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from prismscale.errors import FormatError
from prismscale.graph.node import CollectiveOp
from prismscale.validation.communication.collective_errors import validate
from prismscale.validation.communication.collective_points import CollectivePoint, load_points

HEADER = "collective,nodes,gpus,size_bytes,time_us,hardware,config,source"
ROWS = (
    "all_reduce,1,8,1024,20.0,NVIDIA H100 80GB HBM3,single-node|a,xxrjun/nccl-tests-cluster",
    "all_reduce,1,8,1024,30.0,NVIDIA H100 80GB HBM3,single-node|b,xxrjun/nccl-tests-cluster",
    "all_reduce,1,8,0,1.0,NVIDIA H100 80GB HBM3,single-node|a,xxrjun/nccl-tests-cluster",
    "all_reduce,1,8,2048,1.0,NVIDIA H100 80GB HBM3,algo_sweep,xxrjun/nccl-tests-cluster",
    "all_reduce,10,80,1024,90.0,NVIDIA H100 80GB HBM3,multi-node|a,xxrjun/nccl-tests-cluster",
)
GRAPH = "op_name,nccl_dtype,num_gpus,message_size,latency_ms\nall_gather,half,4,512,0.01\n"


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """A folder of public measurements with a handful of rows."""
    (tmp_path / "nccl").mkdir()
    (tmp_path / "aiconfigurator").mkdir()
    with gzip.open(tmp_path / "nccl" / "nccl_tests.csv.gz", "wt") as file:
        file.write("\n".join((HEADER, *ROWS)) + "\n")
    name = "b200_sxm__nccl_perf__nccl_2.27.3.csv.gz"
    with gzip.open(tmp_path / "aiconfigurator" / name, "wt") as file:
        file.write(GRAPH)
    return tmp_path


def test_repeated_rows_are_one_point(truth: Path) -> None:
    """A point is the median of its repetitions; forced algorithms and no bytes are not read."""
    eight = [p for p in load_points(truth) if p.n_ranks == 8]

    assert [(p.n_bytes, p.time_ns) for p in eight] == [(1024, 25_000.0)]


def test_sizes_of_aiconfigurator_are_elements(truth: Path) -> None:
    """512 halves are 1,024 bytes."""
    (point,) = (p for p in load_points(truth) if p.hardware == "b200")

    assert (point.n_bytes, point.time_ns) == (1024, 10_000.0)


@pytest.mark.parametrize(
    ("hardware", "source", "n_ranks", "nodes", "is_fitted"),
    [
        ("h100", "aiconfigurator nccl_2.27.3", 8, 1, True),
        ("h100", "aiconfigurator nccl_2.27.3", 4, 1, False),
        ("h100", "aiconfigurator nccl_2.29.2", 8, 1, False),
        ("h100", "xxrjun/nccl-tests-cluster", 40, 10, True),
        ("h100", "xxrjun/nccl-tests-cluster", 80, 10, False),
        ("h100", "NVIDIA/dgxc-benchmarking", 8, 1, False),
        ("a100 oci", "oracle-quickstart/oci-hpc-oke", 16, 2, False),
    ],
)
def test_what_is_held_out(
    hardware: str, source: str, n_ranks: int, nodes: int, is_fitted: bool
) -> None:
    """Groups of 4, other laboratories and versions, and 80 GPUs are fitted to by no constant."""
    point = CollectivePoint(
        hardware=hardware,
        source=source,
        op=CollectiveOp.ALL_GATHER,
        n_ranks=n_ranks,
        nodes=nodes,
        n_bytes=1024,
        time_ns=1.0,
    )

    assert point.is_fitted == is_fitted


def test_rows_say_how_many_points_they_are_of(truth: Path) -> None:
    """A family without points has no row; one with points says how many."""
    names = [row.name for row in validate(truth)]

    assert "held out: one node of B200, < 64 MiB (1 points): median error" in names
    assert not any("A100" in name for name in names)


def test_a_damaged_file_is_named(truth: Path) -> None:
    """A file that is not what its name says is an error with the folder's name."""
    (truth / "nccl" / "nccl_tests.csv.gz").write_bytes(b"not gzip")

    with pytest.raises(FormatError, match=str(truth)):
        load_points(truth)


def test_a_folder_without_measurements_is_named(tmp_path: Path) -> None:
    """It says which files were looked for."""
    with pytest.raises(FormatError, match=r"\*__nccl_perf__\*"):
        load_points(tmp_path)
