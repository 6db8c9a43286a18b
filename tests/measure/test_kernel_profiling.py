"""Calls rebuilt from signatures, timed, and the table that replaces the model's figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from prismscale.analysis.emulated import Emulated, KernelUse
from prismscale.cli import app
from prismscale.cluster import Cluster
from prismscale.commands.profile_kernels import signatures_of
from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.kernel_measured import (
    KernelCostSource,
    KernelTable,
    MeasuredKernel,
    MeasuredKernels,
)
from prismscale.cost.kernel_signature import FIELD, TensorShape, parse_signature
from prismscale.errors import FormatError, UsageError
from prismscale.measure.kernel_inputs import build_call, make_tensor
from prismscale.measure.kernel_timing import profile_kernels

CPU = torch.device("cpu")
H200 = Cluster.load("h200-sxm").device
MM = FIELD.join(("aten::mm", "Float[8,4];Float[4,16]@1,4", "Float[8,16]", ""))


def text(name: str, inputs: str, outputs: str = "", arguments: str = "") -> str:
    """A signature of an ATen operator."""
    return FIELD.join((f"aten::{name}", inputs, outputs, arguments))


CALLS = [
    MM,
    text("add.Tensor", "BFloat16[4,8];Half[]!cpu", "BFloat16[4,8]"),
    text("mul_.Scalar", "Float[16]", "Float[16]"),
    text("addmm", "Float[16];Float[8,4];Float[4,16]", "Float[8,16]"),
    text("sum.dim_IntList", "Float[8,4]", "Float[4]", "dim=0;keepdim=0"),
    text("_softmax", "Float[8,4]", "Float[8,4]", "dim=-1;half_to_float=0"),
    text("native_layer_norm", "Float[8,4];Float[4];Float[4]", "Float[8,4]", "normalized_shape=4"),
    text("embedding", "Float[10,4];Long[3,5]", "Float[3,5,4]"),
    text("nll_loss_forward", "Float[8,10];Long[8]", "Float[]", "reduction=1;ignore_index=-100"),
    text("cat", "Float[2,4];Float[3,4]", "Float[5,4]", "dim=0"),
    text("index.Tensor", "Float[8,4];Long[3]", "Float[3,4]"),
    text("where.self", "Bool[8,4];Float[8,4];Float[]", "Float[8,4]"),
    text("_foreach_add_.List", "Float[4];Float[8];Float[4];Float[8]"),
    text("_foreach_mul_.Scalar", "Float[4];Float[8]"),
    text("ones", "", "Float[4,4]", "size=4,4"),
    text("topk", "Float[8,16]", "Float[8,2];Long[8,2]", "k=2;dim=-1;largest=1;sorted=1"),
    text("clone", "Float[4,8]@1,4", "Float[4,8]"),
    text("clamp", "Float[8]", "Float[8]"),
    text(
        "native_layer_norm_backward",
        "Float[8,4];Float[8,4];Float[8,1];Float[8,1];Float[4]",
        "Float[8,4];Float[4]",
        "normalized_shape=4",
    ),
    text("_foreach_addcdiv_.ScalarList", ";".join(["Float[4]"] * 6)),
    text("_fused_sgd_", ";".join(["Float[4]"] * 4), "", "nesterov=0;maximize=0;is_first_step=0"),
    text(
        "_scaled_dot_product_flash_attention_backward",
        ";".join(["Float[1,2,16,8]"] * 5),
        ";".join(["Float[1,2,16,8]"] * 3),
        "is_causal=1",
    ),
    text(
        "_fused_adamw_",
        ";".join(["Float[6]", "Float[7]"] * 4 + ["Float[]"] * 2),
        "",
        "amsgrad=0;maximize=0",
    ),
]


@pytest.mark.parametrize("signature", CALLS, ids=lambda s: s.split(FIELD)[0])
def test_calls_are_rebuilt(signature: str) -> None:
    """Whatever a training step runs can be run from its signature alone."""
    build_call(parse_signature(signature), CPU)()  # raises otherwise


def test_a_rebuilt_call_has_the_recorded_outputs() -> None:
    """Shape and layout are those of the signature."""
    out = build_call(parse_signature(MM), CPU)()

    assert isinstance(out, torch.Tensor)
    assert out.shape == (8, 16)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        (FIELD.join(("mine::scale", "Float[4]", "", "")), "no operator mine::scale"),
        (text("mm", "Float[8,4]"), "cannot be told apart"),
        (text("mm", "Float4[8,4];Float4[4,8]"), "Float4 cannot be made"),
        (text("select.int", "Float[8,4]"), "does not say what 'dim'"),
    ],
)
def test_calls_that_cannot_be_rebuilt_say_why(signature: str, message: str) -> None:
    """The reason names the operator or type."""
    with pytest.raises(UsageError, match=message):
        build_call(parse_signature(signature), CPU)


def test_tensors_are_as_recorded() -> None:
    """Layout, expansion, host memory; indices stay in range."""
    expanded = make_tensor(TensorShape(dtype="Half", sizes=(8, 4), strides=(0, 1)), CPU, below=1)
    indices = make_tensor(TensorShape(dtype="Long", sizes=(100,)), CPU, below=3)

    assert expanded.stride() == (0, 1)
    assert indices.min() >= 0
    assert indices.max() < 3


def test_profiling_measures_each_call_once() -> None:
    """Repeated signatures are one kernel; what cannot run is listed with its reason."""
    unknown = FIELD.join(("mine::scale", "Float[4]", "", ""))
    told: list[tuple[int, int]] = []
    table = profile_kernels([MM, MM, unknown], CPU, progress=lambda *a: told.append(a))

    assert [kernel.signature for kernel in table.kernels] == [MM]
    assert table.kernels[0].device_ns > 0
    assert "no operator" in table.left_out[unknown]
    assert told[-1] == (2, 2)


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        # An index that is out of range for the dimension that the signature names.
        (text("select.int", "Float[8,4]", "Float[4]", "dim=5;index=0"), "Dimension out of range"),
        (
            text(
                "_scaled_dot_product_fused_attention_overrideable_backward",
                ";".join(["Float[1,2,16,8]"] * 5),
            ),
            "known are the backwards of flash, efficient, cudnn attention",
        ),
    ],
)
def test_a_call_that_fails_costs_no_other(signature: str, reason: str) -> None:
    """Whatever error its operator raises, it is left out with a reason, and the rest measured."""
    table = profile_kernels([signature, MM], CPU)

    assert [kernel.signature for kernel in table.kernels] == [MM]
    assert reason in table.left_out[signature]


def test_an_error_without_words_is_told_by_its_type() -> None:
    """Some libraries raise errors with no message."""
    library = torch.library.Library("prismscale_test_silent", "DEF")
    library.define("refuse(Tensor x) -> Tensor")

    class Silent(LookupError):
        """Has no message."""

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise Silent

    library.impl("refuse", refuse, "CPU")
    signature = FIELD.join(("prismscale_test_silent::refuse", "Float[4]", "Float[4]", ""))

    table = profile_kernels([signature, MM], CPU)

    assert table.left_out == {signature: "Silent"}
    assert len(table.kernels) == 1


@pytest.mark.parametrize(
    "signature",
    [
        # ``x[:, ids]``: that the first index was absent is not in the signature.
        text("index.Tensor", "Float[8,4];Long[3]", "Float[8,3]"),
        # A layer whose input needs no gradient: which gradients were asked for is not in it either.
        text(
            "native_layer_norm_backward",
            "Float[8,4];Float[8,4];Float[8,1];Float[8,1];Float[4]",
            "none;Float[4]",
            "normalized_shape=4",
        ),
    ],
)
def test_a_call_that_is_rebuilt_as_another_is_left_out(signature: str) -> None:
    """Its result has another shape than the program's, so its time would be another call's."""
    table = profile_kernels([signature, MM], CPU)

    assert [kernel.signature for kernel in table.kernels] == [MM]
    assert "does not determine the call" in table.left_out[signature]


def table_of(device_ns: int = 123) -> KernelTable:
    """A table of one kernel."""
    kernel = MeasuredKernel(signature=MM, device_ns=device_ns, host_ns=45, spread=0.01)
    return KernelTable(device="a GPU", torch="2.13.0", date="2026-01-31", kernels=(kernel,))


def test_measured_figures_replace_the_models() -> None:
    """What was measured comes from the table, everything else from the model."""
    model = load_kernel_model("h100-sxm")
    measured = MeasuredKernels(table=table_of(), otherwise=model)
    found = measured.cost(MM)

    assert (found.device_ns, found.host_ns, found.source) == (123, 45, "measured")
    assert (found.error, found.kind) == (0.01, "gemm")
    assert measured.cost(CALLS[4]) == model.cost(CALLS[4])


def test_a_job_is_priced_by_its_table(tmp_path: Path) -> None:
    """Read from the file; a compiler's kernels are not those that were measured one by one."""
    add = MeasuredKernel(signature=CALLS[1], device_ns=9, host_ns=9, spread=0.0)
    table = replace(table_of(), device="NVIDIA H200")
    table = replace(table, kernels=(*table.kernels, add))
    table.save(tmp_path / "kernels.json")
    for fused in (False, True):
        costs = KernelCostSource(table=str(tmp_path / "kernels.json"), fused=fused).model(H200)
        assert costs.cost(MM).source == "measured"
        assert (costs.cost(CALLS[1]).source == "measured") != fused


def test_an_operators_name_stands_for_all_its_calls() -> None:
    """For kernels of one's own, whose time somebody knows."""
    ours = MeasuredKernel(signature="mine::scale", device_ns=7, host_ns=1, spread=0.0)
    table = replace(table_of(), kernels=(ours,))
    costed = MeasuredKernels(table=table, otherwise=load_kernel_model("h100-sxm"))
    found = costed.cost(FIELD.join(("mine::scale", "Float[4]", "Float[4]", "")))
    assert (found.device_ns, found.source, found.kind) == (7, "measured", "unknown")


def test_the_table_of_another_gpu_is_refused(tmp_path: Path) -> None:
    """With both names."""
    table_of().save(tmp_path / "kernels.json")
    with pytest.raises(UsageError, match="measured on a GPU; the cluster's GPU is NVIDIA H200"):
        KernelCostSource(table=str(tmp_path / "kernels.json")).model(H200)


def test_tables_survive_the_disk(tmp_path: Path) -> None:
    """Written and read back, a table is the same."""
    table_of().save(tmp_path / "kernels.json")

    assert KernelTable.load(tmp_path / "kernels.json") == table_of()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 2}, "version 2"), ({"kernels": [{"signature": MM}]}, "device_ns' is missing")],
)
def test_foreign_tables_are_refused(tmp_path: Path, change: object, message: str) -> None:
    """Another version, a missing figure."""
    path = tmp_path / "kernels.json"
    table_of().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))  # type: ignore[operator]

    with pytest.raises(FormatError, match=message):
        KernelTable.load(path)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    """With the path in the message."""
    with pytest.raises(UsageError, match=r"none\.json"):
        KernelTable.load(tmp_path / "none.json")


def run_folder(tmp_path: Path) -> Path:
    """A run of two captured ranks with one kernel in common."""

    def use(signature: str, calls: int) -> KernelUse:
        return KernelUse(
            signature=signature, calls=calls, kind="", device_ns=10, host_ns=5, source="modelled"
        )

    for rank, calls in enumerate((1, 5)):
        uses = (use(MM, calls), use(CALLS[1 + rank], 4))
        Emulated(kernels=uses).save(tmp_path / "captures" / "key" / f"rank-{rank}.null.json")
    return tmp_path


def test_signatures_come_longest_first(tmp_path: Path) -> None:
    """Over all captured ranks, each once."""
    assert signatures_of(run_folder(tmp_path)) == [MM, CALLS[1], CALLS[2]]


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    """It says what to give."""
    with pytest.raises(UsageError, match="run --device null"):
        signatures_of(tmp_path)


def test_the_command_wants_a_gpu(tmp_path: Path) -> None:
    """Without one it refuses, and says what to do."""
    done = CliRunner().invoke(app, ["profile-kernels", str(run_folder(tmp_path))])

    assert isinstance(done.exception, UsageError)
    assert "torch sees none here" in str(done.exception)
