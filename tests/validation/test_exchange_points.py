"""Public measurements of DeepEP and HybridEP: what was exchanged, and how long it took."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from prismscale.errors import FormatError
from prismscale.validation.communication.exchange_points import (
    DEEP_EP,
    HYBRID_EP,
    ExchangePoint,
    load_exchanges,
)

HEAD = (
    "kernel_source,node_num,hidden_size,num_token,num_topk,num_experts,dispatch_sms,"
    "dispatch_transmit_us,dispatch_notify_us,combine_sms,combine_transmit_us,combine_notify_us"
)
FOLDER, TABLE = "aiconfigurator", "{}_sxm__wideep_deepep_normal_perf__sglang_0.5.12.csv.gz"


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """One measured row for each GPU."""
    (tmp_path / FOLDER).mkdir()
    for gpu, multiprocessors in (("h100", 12), ("b200", 24)):
        row = f"deepep,1,7168,4096,8,256,{multiprocessors},500,0.0,{multiprocessors},900,0.0"
        with gzip.open(tmp_path / FOLDER / TABLE.format(gpu), "wt") as file:
            file.write(f"{HEAD}\n{row}\n")
    return tmp_path


def of(truth: Path, library: str, *, published: bool) -> list[ExchangePoint]:
    found = [p for p in load_exchanges(truth) if p.library == library]
    return [p for p in found if p.is_published == published]


def test_tokens_go_in_8_bits_and_come_back_in_16(truth: Path) -> None:
    """A token of 8 bits has a scale for each 128 elements."""
    sent, returned, *_ = of(truth, DEEP_EP, published=False)
    assert (sent.row_bytes, returned.row_bytes) == (7168 + 4 * 56, 2 * 7168)
    assert (sent.time_ns, returned.time_ns) == (500e3, 900e3)
    assert (sent.combines, returned.combines) == (False, True)


def test_constants_are_of_an_h100_with_few_multiprocessors(truth: Path) -> None:
    """Whatever else is known is held out."""
    fitted = {(p.gpu, p.multiprocessors) for p in load_exchanges(truth) if p.is_fitted}
    assert fitted == {("h100", 12)}


def test_a_published_bandwidth_counts_a_token_once_for_each_node(truth: Path) -> None:
    """57.69 GB/s: to four nodes, the rank's own too; to ranks where NVLink reaches all."""
    points = of(truth, HYBRID_EP, published=True)
    (between,) = [p for p in points if (p.gpu, p.ranks, p.multiprocessors) == ("h100", 32, 16)][1:2]
    assert between.time_ns == pytest.approx(sum(between.layout.to_node) * 14_336 / 57.69)
    (within,) = [p for p in points if (p.gpu, p.ranks, p.multiprocessors) == ("gb200", 36, 32)][2:]
    assert within.time_ns == pytest.approx(within.layout.received * 14_336 / 596.99)


def test_a_damaged_table_is_named(truth: Path) -> None:
    """Rather than a traceback."""
    (truth / FOLDER / TABLE.format("b200")).write_bytes(b"not gzip")
    with pytest.raises(FormatError, match="measurements of exchanges below"):
        load_exchanges(truth)
