"""Cluster presets and files: what is read, what is refused, and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prismscale.cluster import Cluster, Measured, MeasuredCurve
from prismscale.cost.algorithms import algorithm_names
from prismscale.errors import FormatError, UsageError
from prismscale.graph.node import CollectiveOp

MINIMAL = """
name = "pair"
devices_per_node = 2
nics_per_node = 1
[device]
name = "toy"
memory_bytes = 1_000
[intra_node]
latency_ns = 100
bandwidth_bytes_per_s = 1e9
[inter_node]
latency_ns = 1000
bandwidth_bytes_per_s = 1e8
"""


@pytest.mark.parametrize(
    "name",
    ["a100-80g", "b200", "b300", "gb200", "gb300", "h100-sxm", "h200-sxm", "loopback-gloo"],
)
def test_preset_is_listed_and_loads_under_its_own_name(name: str) -> None:
    """Every promised preset exists and says what it is."""
    assert name in Cluster.presets()
    assert Cluster.load(name).name == name


@pytest.mark.parametrize("name", Cluster.presets())
def test_preset_names_its_sources(name: str) -> None:
    """No preset comes without provenance."""
    assert Cluster.load(name).sources


@pytest.mark.parametrize("name", Cluster.presets())
def test_preset_tunes_only_known_algorithms(name: str) -> None:
    """A misspelt algorithm table would silently never be used."""
    assert set(Cluster.load(name).algorithms) <= set(algorithm_names())


@pytest.mark.parametrize("name", Cluster.presets())
def test_toml_round_trip_gives_an_equal_cluster(name: str) -> None:
    """What is written is what is read."""
    cluster = Cluster.load(name)

    assert Cluster.from_toml(cluster.to_toml()) == cluster


def test_ranks_fill_nodes_in_order() -> None:
    """Placement is rank // devices_per_node at any world size."""
    cluster = Cluster.load("h100-sxm")

    assert [cluster.node_of(r) for r in (0, 7, 8, 8191)] == [0, 0, 1, 1023]


def test_unknown_preset_offers_the_closest_name() -> None:
    """A typing error is answered with the name that was meant."""
    with pytest.raises(UsageError, match="did you mean h100-sxm"):
        Cluster.load("h100-smx")


def test_file_is_loaded_by_path(tmp_path: Path) -> None:
    """A user's own cluster needs no installation."""
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL)

    assert Cluster.load(path).devices_per_node == 2


def test_a_file_says_what_differs_from_its_base(tmp_path: Path) -> None:
    """Key by key, in tables, too."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "b200"\nname = "half"\n[intra_node]\nbandwidth_bytes_per_s = 450e9\n')
    base, mine = Cluster.load("b200"), Cluster.load(path)
    halved = replace(base.intra_node, bandwidth_bytes_per_s=450e9)
    assert mine == replace(base, name="half", intra_node=halved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "b20"', "base is 'b20'.*did you mean b200"),
        ('base = "b200"\nnvlink = 1', "unknown key 'nvlink'"),
        ('base = "b200"\n[device.peak_flops]\nbfloat16 = 0', "peak_flops.bfloat16 is 0"),
        ('base = "b200"\nnodes_per_nvlink_domain = 0', "nodes_per_nvlink_domain is 0"),
        ('base = "gb200"\nfabric = {nodes_per_pod = 20}', "nodes_per_pod is 20.*multiple of.*18"),
    ],
)
def test_what_a_base_cannot_be_is_refused(text: str, message: str) -> None:
    """With the key to mend."""
    with pytest.raises(FormatError, match=message):
        Cluster.from_toml(text)


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    """A path that does not exist is named."""
    with pytest.raises(UsageError, match=r"none\.toml.*No such file"):
        Cluster.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nics_per_node = 1", "nics_per_nod = 1", "unknown key 'nics_per_nod'.*nics_per_node"),
        ("nics_per_node = 1", "", "key 'nics_per_node' is missing"),
        ("latency_ns = 100\n", "latency_ns = 'x'\n", "'intra_node.latency_ns' is 'x'.*a number"),
        ("latency_ns = 100\n", "latency_ns = inf\n", "intra_node.latency_ns.*finite"),
        ("latency_ns = 100\n", "latency_ns = true\n", "intra_node.latency_ns.*a number"),
        ("memory_bytes = 1_000", "memory_bytes = 1.5", "device.memory_bytes.*whole number"),
        ("devices_per_node = 2", "devices_per_node = 0", "devices_per_node is 0; it must be more"),
        ("= 1e8", "= -1e8", "inter_node: bandwidth_bytes_per_s"),
        ("[inter_node]", "[inter_node", "not valid TOML"),
    ],
)
def test_damaged_file_names_the_key(old: str, new: str, message: str) -> None:
    """The message leads to the line to mend."""
    with pytest.raises(FormatError, match=message):
        Cluster.from_toml(MINIMAL.replace(old, new))


def test_measured_section_is_read() -> None:
    """Measurements written by the calibration are part of the cluster."""
    text = MINIMAL + (
        "[measured]\nmachine = 'm'\ndate = '2025-01-01'\n"
        "[[measured.curves]]\nop = 'all_reduce'\ngroup_size = 2\n"
        "n_bytes = [64, 128]\ntime_ns = [10, 20.5]\n"
    )

    measured = Cluster.from_toml(text).measured

    curve = MeasuredCurve(
        op=CollectiveOp.ALL_REDUCE, group_size=2, n_bytes=(64, 128), time_ns=(10.0, 20.5)
    )
    assert measured == Measured(machine="m", date="2025-01-01", curves=(curve,))


def test_measured_sizes_must_ascend() -> None:
    """Interpolation needs an order."""
    with pytest.raises(UsageError, match="must ascend"):
        MeasuredCurve(op=CollectiveOp.SEND, group_size=2, n_bytes=(128, 64), time_ns=(1.0, 2.0))


def test_unknown_operation_in_a_curve_is_refused() -> None:
    """Operations are spelt as torch spells them."""
    text = MINIMAL + (
        "[measured]\nmachine = 'm'\ndate = 'd'\n[[measured.curves]]\nop = 'allreduce'\n"
        "group_size = 2\nn_bytes = [64]\ntime_ns = [10]\n"
    )

    with pytest.raises(FormatError, match=r"curves\[0\]\.op.*did you mean all_reduce"):
        Cluster.from_toml(text)
