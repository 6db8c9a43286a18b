"""How what-ifs are written, and what is no what-if."""

from __future__ import annotations

import pytest

from prismscale.cluster import Cluster
from prismscale.cost.kernel_changes import HostFactor, KernelFactor, ProductDtype
from prismscale.durations.what_if.forms import (
    ComputeShared,
    Form,
    GroupOn,
    LinkSpeed,
    LinksShared,
    OverlapOff,
    RecomputeOff,
    parse_what_if,
    parse_what_ifs,
)
from prismscale.errors import UsageError


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("kernel=attention.* x0.5", KernelFactor(pattern="attention.*", factor=0.5)),
        ("kernel=attention backward ×2", KernelFactor(pattern="attention backward", factor=2.0)),
        ("kernel=a=b x1e-3", KernelFactor(pattern="a=b", factor=1e-3)),
        (" overlap = mesh_dp  off ", OverlapOff(group="mesh_dp")),
        ("link=nvlink x2", LinkSpeed(link="intra_node", factor=2.0)),
        ("link=inter_node x0.5", LinkSpeed(link="inter_node", factor=0.5)),
        ("group=tp on network", GroupOn(group="tp", link="inter_node")),
        ("group=dp on nvlink", GroupOn(group="dp", link="intra_node")),
        ("links=shared", LinksShared()),
        ("compute=shared", ComputeShared()),
        ("recompute=off", RecomputeOff()),
        ("dtype=fp8", ProductDtype(name="fp8")),
        ("host=x2", HostFactor(factor=2.0)),
        ("host = × 0.5", HostFactor(factor=0.5)),
    ],
)
def test_every_form_is_read(text: str, form: Form) -> None:
    """Blanks do not matter."""
    assert parse_what_if(text).form == form


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "give 'kernel=attention"),
        ("kernel", "give 'kernel=attention"),
        ("kernels=mm x2", "did you mean kernel"),
        ("kernel=mm", "give it like 'kernel="),
        ("kernel=mm 2", "give it like 'kernel="),
        ("kernel= x2", "give it like 'kernel="),
        ("kernel=mm x", "give it like 'kernel="),
        ("kernel=mm xfast", "no number"),
        ("kernel=mm x0", "above 0"),
        ("kernel=mm x-1", "above 0"),
        ("kernel=mm xnan", "above 0"),
        ("kernel=mm xinf", "above 0"),
        ("kernel=mm x1e6", "below 1,000,000"),
        ("kernel=( x2", "no regular expression"),
        ("host=2", "give it like 'host=x2'"),
        ("host=python x2", "give it like 'host=x2'"),
        ("host=x0", "above 0"),
        ("overlap=mesh_dp", "give it like 'overlap="),
        ("overlap=mesh_dp on", "give it like 'overlap="),
        ("overlap=off", "give it like 'overlap="),
        ("link=nvlink", "give it like 'link="),
        ("link=nvlik x2", "did you mean nvlink"),
        ("link=network x0", "above 0"),
        ("link=network x1e-300", "above 0"),
        ("group=tp network", "give it like 'group="),
        ("group=tp on moon", "allowed: inter_node, intra_node, network, nvlink"),
        ("links=off", "give it like 'links=shared'"),
        ("compute=off", "give it like 'compute=shared'"),
        ("recompute=on", "give it like 'recompute="),
        ("dtype=fp9", "did you mean fp8"),
    ],
)
def test_what_is_no_what_if_is_refused_with_a_way_out(text: str, told: str) -> None:
    """What was given, and how to write it."""
    with pytest.raises(UsageError, match=r"what-if") as refused:
        parse_what_if(text)
    assert told in str(refused.value)


def test_a_what_if_that_is_given_twice_is_refused() -> None:
    """However it is written."""
    with pytest.raises(UsageError, match="given twice"):
        parse_what_ifs(["link=nvlink x2", "link=intra_node x2.0"])


def test_a_group_is_put_in_one_place() -> None:
    """Two what-ifs that contradict each other."""
    with pytest.raises(UsageError, match="one group in two places"):
        parse_what_ifs(["group=tp on network", "group=tp on nvlink"])


def test_a_link_gets_another_bandwidth_and_keeps_its_latency() -> None:
    """The other link stays as it is."""
    h100 = Cluster.load("h100-sxm")
    faster = LinkSpeed(link="inter_node", factor=2.0).on(h100)
    assert faster.inter_node.bandwidth_bytes_per_s == 2 * h100.inter_node.bandwidth_bytes_per_s
    assert faster.inter_node.latency_ns == h100.inter_node.latency_ns
    assert faster.intra_node == h100.intra_node
