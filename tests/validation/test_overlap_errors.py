"""What kernels lose beside communications, against what others published."""

from __future__ import annotations

from prismscale.validation.communication.overlap_errors import PUBLISHED, overlap_rows


def test_every_published_figure_is_a_row_without_a_bar() -> None:
    """The row's figure follows from what it names."""
    rows = list(overlap_rows())
    assert len(rows) == len(PUBLISHED)
    for row, published in zip(rows, PUBLISHED, strict=True):
        assert row.bar is None
        assert f"{published.predicted:.2f} times" in row.name
        assert row.value == 100 * (published.predicted / published.times - 1)


def test_the_law_says_that_products_lose_most() -> None:
    """On the GPU with more channels and fewer multiprocessors more than on the newer one."""
    a100, h100 = (b.predicted for b in PUBLISHED if b.what == "products")
    others = [b.predicted for b in PUBLISHED if b.what != "products"]
    assert a100 > h100 > max(others)
