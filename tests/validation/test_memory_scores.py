"""Kernels that wait for memory against tables of measurements."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.errors import UsageError
from prismscale.validation.kernels.memory_rows import load_memory_rows
from prismscale.validation.kernels.memory_scores import validate

HEAD = "norm_name,norm_type,backend,gpu_name,N,C,success,fwd_time_ms,bwd_time_ms"


def write(truth: Path, *rows: str) -> None:
    """A table of norms."""
    path = truth / "cudnn_frontend" / "norms__mine.csv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join((HEAD, *rows)) + "\n")


def test_a_held_out_norm_is_scored_by_what_the_null_device_charges(tmp_path: Path) -> None:
    """Twice as long as modelled: an error of half; a model that may be fitted does not count."""
    shape = "rms_norm,pytorch,NVIDIA H200,8192,4096,True"
    write(tmp_path, f"llama3-70b,{shape},1,inf", f"llama3-8b,{shape},1,inf")
    model = ModelledKernels(profile=KernelProfile.load("h200-sxm").burst())
    (signature,) = load_memory_rows(tmp_path)[0].signatures
    time_ms = 2 * model.cost(signature).device_ns / 1e6
    table = tmp_path / "cudnn_frontend" / "norms__mine.csv"
    table.write_text(table.read_text().replace(",1,inf", f",{time_ms},inf"))

    median, *_ = validate(tmp_path)

    assert median.name == "h200-sxm norm forward, torch (1 rows): median error"
    assert median.value == pytest.approx(50, abs=0.01)


def test_failed_measurements_are_left_out(tmp_path: Path) -> None:
    """A row that did not succeed, and a time that is not finite."""
    write(
        tmp_path,
        "llama3-70b,rms_norm,pytorch,NVIDIA H200,8192,4096,True,0.1,inf",
        "llama3-70b,rms_norm,cudnn,NVIDIA H200,8192,4096,False,0.1,0.1",
    )

    (row,) = load_memory_rows(tmp_path)

    assert row.group == "norm forward, torch"


def test_a_number_beside_a_tensor_lies_in_host_memory(tmp_path: Path) -> None:
    """So the operator is pointwise, and not one with operands of two shapes."""
    path = tmp_path / "tracelens" / "op_kernel_times_mine.csv.gz"
    path.parent.mkdir(parents=True)
    head = "gpu,name,Input Dims,Input type,Input Strides,Kernel Time_us_mean"
    row = """h100,aten::add,"((64, 64), ())","('float', 'double')","((64, 1), ())",3.5"""
    path.write_bytes(gzip.compress(f"{head}\n{row}\n".encode()))

    (found,) = load_memory_rows(tmp_path)

    assert found.group == "pointwise in a running model"
    assert found.time_ns == 3500


def test_a_folder_without_measurements_is_refused(tmp_path: Path) -> None:
    """The message names files that are expected."""
    with pytest.raises(UsageError, match="norms__"):
        load_memory_rows(tmp_path)
