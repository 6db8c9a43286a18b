"""Streaming of JSON: equal to the plain parser, whatever the chunk borders."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.errors import FormatError
from prismscale.formats import json_stream
from prismscale.formats.json_stream import members

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.floats(0, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def streamed(text: str, chunk: int) -> tuple[dict[str, Any], list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "CHUNK", chunk)
        found = list(members("x", io.BytesIO(text.encode()), "items"))
    rest = {key: value for key, value in found if key != "items"}
    return rest, [value for key, value in found if key == "items"]


@given(st.lists(values, max_size=5), values, st.integers(1, 40), st.sampled_from([None, 1]))
def test_streaming_equals_parsing(
    items: list[Any], other: Any, chunk: int, indent: int | None
) -> None:
    """Items and other members come out as json.loads gives them."""
    text = json.dumps({"before": other, "items": items, "after": [other]}, indent=indent)
    assert streamed(text, chunk) == ({"before": other, "after": [other]}, items)


@pytest.mark.parametrize(
    "text", ["", "{", '{"a"', '{"items": [1, 2', '{"items": [1}', "7", "[1 2]"]
)
def test_broken_documents_are_refused(text: str) -> None:
    """Every way to break a document ends in a FormatError."""
    with pytest.raises(FormatError, match="x: "):
        streamed(text, 3)


def test_plain_array_is_the_array() -> None:
    """Chrome traces may be the bare list of events."""
    assert streamed("[1, 2]", 2) == ({}, [1, 2])
