"""``nvidia-smi``, as a program starts it."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from prismscale.devices.null.cuda_bindings import uuid_of
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.management.system_tools import node
from prismscale.devices.null.runtime import active


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command answers in this process's environment."""
    return subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_it_lists_the_gpus_of_the_node() -> None:
    """With the UUIDs that CUDA's own Python interface tells."""
    lines = asked("-L").stdout.splitlines()
    assert len(lines) == active().spec.devices_per_node
    assert lines[3] == f"GPU 3: {torch.cuda.get_device_name()} (UUID: GPU-{uuid_of(3)})"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--query-gpu=name,memory.total", "--format=csv,noheader", "-i", "1"),
        ("--query-gpu", "name, memory.total", "--format", "csv, noheader", "--id=1"),
    ],
)
def test_a_query_is_answered_in_csv(arguments: tuple[str, ...]) -> None:
    """Either way of writing it; memory in MiB."""
    total = active().spec.total_memory_bytes >> 20
    assert asked(*arguments).stdout == f"{torch.cuda.get_device_name()}, {total} MiB\n"


def test_a_query_without_units_has_a_line_for_each_gpu_below_its_heading() -> None:
    """As programs parse it."""
    shown = asked("--query-gpu=index,memory.free", "--format=csv,nounits").stdout.splitlines()
    assert shown[0] == "index, memory.free"
    assert [int(line.split(", ")[0]) for line in shown[1:]] == list(range(len(shown) - 1))


def test_all_gpus_are_joined_by_nvlink() -> None:
    """Each pair but a GPU and itself."""
    head, *rows = asked("topo", "-m").stdout.splitlines()
    assert head.split() == [f"GPU{n}" for n in range(active().spec.devices_per_node)]
    assert rows[0].split() == ["GPU0", "X", *["NV18"] * (len(rows) - 1)]


def test_an_a100_has_fewer_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 where an H100 has 18."""
    told = json.dumps(node(device_spec("a100-80g", devices_per_node=2)))
    monkeypatch.setenv("PRISMSCALE_NVIDIA_SMI", told)
    assert asked("topo", "-m").stdout.splitlines()[1].split() == ["GPU0", "X", "NV12"]


def test_the_overview_names_the_driver_and_each_gpu() -> None:
    """Which is what programs write into their logs."""
    done = asked()
    assert done.returncode == 0
    assert "CUDA Version: 13.0" in done.stdout
    assert done.stdout.count(torch.cuda.get_device_name()) == active().spec.devices_per_node


@pytest.mark.parametrize(
    "arguments", [("-q",), ("--query-gpu=fan.blades", "--format=csv"), ("--query-gpu=name",)]
)
def test_what_it_does_not_know_fails_as_nvidias_does(arguments: tuple[str, ...]) -> None:
    """Exit code 6; no traceback."""
    done = asked(*arguments)
    assert done.returncode == 6
    assert "Traceback" not in done.stderr
