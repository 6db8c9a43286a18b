"""FlashAttention 3 that a program gets from a hub of kernels."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from support.null_program import null_program

HUB = """
def get_kernel(repo_id, *, revision=None, version=None):
    raise OSError(f"no network: {repo_id}")

def has_kernel(repo_id, *, revision=None, version=None):
    return repo_id == "some/other"
"""
VERSIONS = """
def revision_or_version(*, revision, version):
    if revision is None and version is None:
        raise ValueError("Either a revision or a version must be specified.")
"""
FUNCTIONS = """
import json, torch
from kernels import get_kernel, has_kernel
attention = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_interface
def random(*sizes):
    return torch.randn(sizes, dtype=torch.bfloat16, device="cuda", requires_grad=True)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The library that asks a hub, with nobody to ask."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(HUB)
    return tmp_path


def answer(library: Path, program: str, **options: str) -> Any:
    """What a program prints last."""
    before = f"import sys; sys.path.insert(0, {str(library)!r})\n"
    return json.loads(null_program(program, before=before, **options).splitlines()[-1])


def test_both_directions_are_the_librarys_kernels(library: Path) -> None:
    """Of whole and of packed sequences; what is kept are the inputs, the output and its rows."""
    program = (
        FUNCTIONS
        + """
q, k = random(2, 1024, 8, 128), random(2, 1024, 2, 128)
attention.flash_attn_func(q, k, k)  # what a first call leaves behind is not of interest
before = torch.cuda.memory_allocated()
out = attention.flash_attn_func(q, k, k, causal=True, window_size=(256, 0))
kept = torch.cuda.memory_allocated() - before
out.sum().backward()
packed = random(2048, 8, 128)
ends = torch.tensor([0, 512, 2048], dtype=torch.int32, device="cuda")
called = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1536, max_seqlen_k=1536)
both = attention.flash_attn_varlen_func(packed, packed, packed, return_attn_probs=True, **called)
both[0].sum().backward()
shapes = [list(t.shape) for t in (out, q.grad, k.grad, *both, packed.grad)]
print(json.dumps([kept - out.nbytes - 2 * 8 * 1024 * 4, shapes]))
"""
    )
    extra, shapes = answer(library, program)
    assert 0 <= extra < 4096
    whole, grouped, packed = [2, 1024, 8, 128], [2, 1024, 2, 128], [2048, 8, 128]
    assert shapes == [whole, whole, grouped, packed, [8, 2048], packed]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs Triton")
def test_a_compiled_region_takes_it_whole(library: Path) -> None:
    """Without a graph break, forward and backward."""
    program = (
        FUNCTIONS
        + """
def layer(x):
    return attention.flash_attn_func(x * 2, x, x, causal=True) + 1
x = random(1, 512, 4, 64)
torch.compile(layer, fullgraph=True)(x).sum().backward()
print(json.dumps(list(x.grad.shape)))
"""
    )
    assert answer(library, program) == [1, 512, 4, 64]


def test_the_result_of_8_bit_queries_is_of_16_bits(library: Path) -> None:
    """Eager, and as a compiled region's shape rules say."""
    program = (
        FUNCTIONS
        + """
q = torch.empty(1, 256, 8, 128, device="cuda", dtype=torch.float8_e4m3fn)
out = attention.flash_attn_func(q, q, q)
from prismscale.devices.null.libraries.flash_attention.hub_interface import _forward_shapes
ruled, _ = _forward_shapes(q, q, q)
print(json.dumps([str(out.dtype), str(ruled.dtype)]))
"""
    )
    assert answer(library, program) == ["torch.bfloat16", "torch.bfloat16"]


def test_other_kernels_are_the_librarys_own_matter(library: Path) -> None:
    """It says what it would say without us."""
    program = """
import json
from kernels import get_kernel, has_kernel
try:
    get_kernel("some/rotary", version=1)
except OSError as error:
    print(json.dumps([str(error), has_kernel("some/other"), has_kernel("some/rotary")]))
"""
    assert answer(library, program) == ["no network: some/rotary", True, False]


@pytest.mark.parametrize(("gpu", "has"), [("h100-sxm", True), ("a100-80g", True), ("b200", False)])
def test_a_gpu_that_it_has_no_build_for_gets_none(library: Path, gpu: str, has: bool) -> None:
    """Programs then take torch's attention, as they do there."""
    program = """
import json
from kernels import get_kernel, has_kernel
found = [has_kernel("kernels-community/flash-attn3", version=1)]
try:
    get_kernel("kernels-community/flash-attn3", version=1)
except RuntimeError as error:
    found.append("no build" in str(error))
print(json.dumps(found))
"""
    assert answer(library, program, gpu=gpu) == ([True] if has else [False, True])


def test_what_newer_versions_of_the_library_ask_for_they_still_ask_for(library: Path) -> None:
    """Without a version a program has no kernel there, and none here."""
    (library / "kernels" / "_versions.py").write_text(VERSIONS)
    init = library / "kernels" / "__init__.py"
    init.write_text("from kernels._versions import revision_or_version\n" + HUB)
    program = """
import json
from kernels import get_kernel
try:
    get_kernel("someone/flash-attention-3")
except ValueError as error:
    print(json.dumps(str(error)))
"""
    assert "must be specified" in answer(library, program)


def test_caches_of_keys_are_refused_in_words(library: Path) -> None:
    """They are for inference."""
    program = (
        FUNCTIONS
        + """
try:
    attention.flash_attn_with_kvcache(1, 2, 3)
except NotImplementedError as error:
    print(json.dumps(str(error)))
"""
    )
    assert "caches" in answer(library, program)
