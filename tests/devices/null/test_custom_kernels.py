"""Kernels that a program brings along, and what reads of bytes that do not exist say."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from prismscale.devices.null import custom_kernels, value_policy
from support import op_log, triton_kernels
from support.null_program import null_program


def test_an_operator_without_a_shape_rule_is_named_with_the_way_to_give_one() -> None:
    """The message names the operator, register_fake, and where its time comes from."""
    library = torch.library.Library("test_without_rule", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="test_without_rule::mystery") as caught:
        torch.ops.test_without_rule.mystery(torch.empty(3, device="cuda"))

    assert "register_fake" in str(caught.value)
    assert "--kernels FILE" in str(caught.value)


def test_an_operator_with_a_shape_rule_runs_by_its_name() -> None:
    """register_fake is enough; the record carries the operator's name."""
    library = torch.library.Library("test_with_rule", "FRAGMENT")
    library.define("half(Tensor x) -> Tensor")
    torch.library.register_fake("test_with_rule::half", lambda x: x.new_empty(x.shape[0] // 2))
    op_log.drain_ops()
    op_log.record_ops()
    result = torch.ops.test_with_rule.half(torch.empty(8, device="cuda"))
    op_log.record_ops(False)

    assert result.shape == (4,)
    assert [record.signature.name for record in op_log.drain_ops()] == ["test_with_rule::half"]


def test_operators_that_were_taken_away_are_forgotten() -> None:
    """A later one, which torch may put at the same address, goes by its own name and rule."""
    op_log.drain_ops()
    op_log.record_ops()
    for name in ("first", "second", "third"):
        library = torch.library.Library("test_taken_away", "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x.new_empty(len(x)), "Meta")
        getattr(torch.ops.test_taken_away, name)(torch.empty(8, device="cuda"))
        library._destroy()
    op_log.record_ops(False)
    names = [record.signature.name for record in op_log.drain_ops()]
    assert names == [f"test_taken_away::{name}" for name in ("first", "second", "third")]


def test_an_operator_written_in_python_runs_as_it_is() -> None:
    """torch.library.custom_op: its body's ops are what the device sees."""

    @torch.library.custom_op("test_in_python::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert twice(torch.ones(3, device="cuda")).tolist() == [2.0, 2.0, 2.0]


def test_a_triton_launch_is_an_op_of_what_its_source_says() -> None:
    """A product of tiles, with what is read and written; what is written is forgotten."""
    a, b, c = (torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    sizes = {"PRECISION": "tf32", "BM": 16, "BN": 16, "BK": 16, "num_warps": 4}
    (record,) = launched(triton_kernels.matmul, (a, b, c, 16, 16, 16), sizes, (1,))

    assert record.signature.name == "triton::matmul.gemm"
    assert record.signature.arguments["extents"] == (1, 64, 64, 1)
    assert [tensor.shape for tensor in record.signature.inputs] == [(16, 16)] * 3
    assert (value_policy.known(a) is None, value_policy.known(c) is None) == (False, True)


def test_a_triton_launch_is_told_its_grid_by_its_arguments() -> None:
    """Options of Triton's are among them."""
    x = torch.zeros(1000, device="cuda")
    seen: list[int] = []

    def grid(named: Mapping[str, int]) -> tuple[int]:
        seen.append(named["num_warps"])
        return (-(-named["count"] // named["B"]),)

    (record,) = launched(triton_kernels.double, (x, 1000), {"B": 256, "num_warps": 8}, grid)
    assert record.signature.arguments["extents"] == (8000,)
    assert seen == [8]


def test_a_triton_kernel_that_cannot_be_followed_is_an_op_over_its_tensors() -> None:
    """Its name and tensors are recorded, and what the tensors held is forgotten."""
    x = torch.zeros(4, dtype=torch.int32, device="cuda") + torch.empty(1, device="cuda").int()
    (record,) = launched(triton_kernels.unending, (x,), {}, (1,))

    assert record.signature.name == "triton::unending"
    assert [tensor.shape for tensor in record.signature.inputs] == [(4,)]
    assert value_policy.known(x) is None


def test_a_triton_launch_without_tensors_does_nothing() -> None:
    """There is nothing whose bytes could give it a cost."""
    assert len(launched(triton_kernels.unending, (1,), {}, (1,))) == 0


def test_a_triton_launch_without_programs_does_nothing() -> None:
    """Experts without tokens: Triton launches nothing either."""
    x = torch.zeros(0, device="cuda")
    assert len(launched(triton_kernels.double, (x, 0), {"B": 256}, (0,))) == 0


def launched(
    kernel: Any, args: Sequence[Any], named: Mapping[str, Any], grid: Any
) -> list[op_log.OpRecord]:
    """What one launch was recorded as."""
    return op_log.ops_of(lambda: custom_kernels.launch_source(kernel, args, named, grid))


TUNED = """
import torch
import triton
import triton.language as tl
@triton.autotune(configs=[triton.Config({"BLOCK": n}) for n in (64, 128)], key=["n"])
@triton.jit
def add_kernel(x, out, n, BLOCK: tl.constexpr):
    pass
def held_after_launch():
    x = torch.ones(1 << 20, device="cuda")
    add_kernel[(1,)](x, torch.empty_like(x), x.numel())
    del x
    return torch.cuda.memory_allocated()
"""


def test_a_tuned_kernel_holds_no_tensors_after_its_launch(tmp_path) -> None:
    """As Triton's own: they may be freed."""
    (tmp_path / "tuned.py").write_text(TUNED)
    found_here = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    program = "import tuned; print(tuned.held_after_launch())"
    assert null_program(program, PYTHONPATH=found_here) == "0\n"


def test_a_cuda_source_is_an_op_over_its_tensors() -> None:
    """What ``torch.cuda._compile_kernel`` makes of it, on the stream that it is given."""
    kernel = torch.cuda._compile_kernel("__global__ void scaled(…) {}", "scaled")
    kernel.set_shared_memory_config(100_000)
    x, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    found = op_log.ops_of(lambda: kernel((4, 1, 1), (128, 1, 1), (x, 8, 0.5), 100_000, stream))
    (record,) = found
    assert record.signature.name == "cuda_source::scaled"
    assert [tensor.shape for tensor in record.signature.inputs] == [(8,)]
    assert record.stream == stream.stream_id
    assert value_policy.known(x) is None
    assert len(op_log.ops_of(lambda: kernel((0, 1, 1), args=(x,)))) == 0, "no block"


def test_cuda_sources_are_refused_by_name() -> None:
    """torch would miss CUDA_HOME; the message says what to do instead."""
    with pytest.raises(OSError, match=r"'my_kernels' has CUDA sources.*register_fake"):
        cpp_extension.load_inline("my_kernels", cpp_sources="", cuda_sources="__global__ void f();")


def test_a_module_is_changed_when_it_is_imported_later(tmp_path, monkeypatch) -> None:
    """Importing Triton here would take seconds: its functions are replaced on its first import."""
    (tmp_path / "imported_later.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    actions = {"imported_later": lambda module: setattr(module, "answer", 2)}
    custom_kernels.Watcher(actions).begin()

    assert importlib.import_module("imported_later").answer == 2


def test_a_missing_triton_is_explained() -> None:
    """CPU builds of torch do not bring it along."""
    error = ModuleNotFoundError("No module named 'triton'", name="triton")
    custom_kernels.explain_missing(error)

    assert "pip install triton" in error.__notes__[0]


_READS_AN_ADDRESS = """
import ctypes, torch
from prismscale.devices.null.runtime import activate
from prismscale.devices.null.gpus import device_spec
activate(device_spec("h100-sxm"))
def use_pointer():
    ctypes.string_at(torch.empty(4, device="cuda").data_ptr(), 16)
use_pointer()
"""


def test_a_c_function_that_follows_an_address_is_explained() -> None:
    """The process ends as it would, after a message and the line."""
    done = subprocess.run(
        [sys.executable, "-c", _READS_AN_ADDRESS], capture_output=True, text=True, check=False
    )

    assert done.returncode < 0
    assert "such tensors have no bytes" in done.stderr
    assert "in use_pointer" in done.stderr
