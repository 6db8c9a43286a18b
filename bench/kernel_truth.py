"""NeuSight's public kernel measurements as kernel signatures and times.

Each CSV of ``neusight/label/<GPU>/`` is one model run eagerly in float32 (TF32 off), one row an
operator of its first block, with CUDA-event times of the forward, of the backward, and of adding
the weight's gradient to what is there. A row becomes the kernels that ATen starts for it, written
as the null device writes them. The JSON beside it holds the time of the whole model.

How the times were taken matters. On the H100 machine an operator that launches nothing reads 6.7 µs
and the smallest kernel 12 to 20 µs (A100: 9.2 and 16 to 28): below a :class:`Machine`'s floor a row
shows the program that measured, not the GPU, and is left out of fits. A row's kernel starts some
time after its first event, while the dispatcher runs: the overhead. The backward of dropout is left
out: it was recorded through its twice-differentiable form, which runs three kernels more than
training does.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FIELD = "\x1f"

Shape = tuple[int, ...]
Kernels = dict[str, list[str]]
"""Signatures by what they are part of: ``forward``, ``backward``, ``accumulate``."""
Rule = Callable[[list[Shape], Shape], Kernels]
"""What an operator of these inputs and this output launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where the rows of one GPU were measured."""

    folder: str
    overhead_ns: float
    floor_ns: float
    """For one kernel."""
    floor_per_kernel_ns: float
    """For each one more."""


MACHINES = {
    "h100-sxm": Machine(
        folder="NVIDIA_H100_80GB_HBM3", overhead_ns=5e3, floor_ns=24e3, floor_per_kernel_ns=12e3
    ),
    "a100-pcie": Machine(
        folder="NVIDIA_A100_80GB_PCIe", overhead_ns=8e3, floor_ns=34e3, floor_per_kernel_ns=18e3
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The kernels of one row's part, and what they took together."""

    model: str
    part: str
    signatures: tuple[str, ...]
    time_ns: float
    """0 where the row's time is of other kernels than these."""
    in_block: bool
    """Part of the first block; a model runs it once a layer."""
    machine: Machine

    @property
    def shows_the_gpu(self) -> bool:
        """Long enough for the GPU, rather than the program that measured, to have set the time."""
        more = self.machine.floor_per_kernel_ns * (len(self.signatures) - 1)
        return self.time_ns >= self.machine.floor_ns + more


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRun:
    """One model on one GPU."""

    name: str
    model: str
    layers: int
    forward_ns: float
    backward_ns: float
    """0 for inference."""
    measurements: tuple[Measurement, ...]


def load_runs(truth: Path, gpu: str) -> list[ModelRun]:
    """The runs of ``gpu`` that have rows."""
    runs, machine = [], MACHINES[gpu]
    for path in sorted((truth / "neusight" / "label" / machine.folder).glob("*.csv")):
        total = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        model = path.name.split("-")[0]
        with path.open(newline="", encoding="utf-8") as file:
            found = tuple(m for row in csv.DictReader(file) for m in _measured(row, model, machine))
        runs.append(
            ModelRun(
                name=path.stem,
                model=model,
                layers=total["num_layer"],
                forward_ns=1e6 * total["fw_latency"],
                backward_ns=1e6 * total["bwall_latency"],
                measurements=found,
            )
        )
    return runs


def distinct(runs: list[ModelRun]) -> list[Measurement]:
    """Measurements of kernels, once each, without those that show the measuring program."""
    seen: dict[tuple[str, ...], Measurement] = {}
    for run in runs:
        for found in run.measurements:
            if found.shows_the_gpu:
                seen.setdefault(found.signatures, found)
    return list(seen.values())


def call(name: str, inputs: list[Shape], outputs: list[Shape], arguments: str = "") -> str:
    """Signature of a call on contiguous float32 tensors; 1-element ones are 0-dim on the GPU."""
    read = ";".join(_text(shape) for shape in inputs)
    written = ";".join(_text(shape) for shape in outputs)
    return FIELD.join((f"aten::{name}", read, written, arguments))


def _text(shape: Shape, strides: str = "") -> str:
    return f"Float[{','.join(map(str, shape))}]{strides}" if shape != (1,) else "Float[]"


def _measured(row: Mapping[str, str], model: str, machine: Machine) -> Iterator[Measurement]:
    if not row["output_shape"].startswith("(") or not row["dtype"].startswith("torch.float"):
        return
    out: Shape = ast.literal_eval(row["output_shape"])
    shapes = [tuple(shape) for shape in ast.literal_eval(row["input_shapes"])]
    rules = _RULES.get(_operator(row))
    if rules is None or not shapes:
        return
    times = {"forward": row["fw_latency"], "backward": row["bw_latency"]}
    times["accumulate"] = row["acc_latency"]
    for part, signatures in rules(shapes, out).items():
        time_ns = 1e6 * float(times[part] or 0)
        if signatures and time_ns:
            if rules is _dropout and part == "backward":
                time_ns = 0.0
            yield Measurement(
                model=model,
                part=part,
                signatures=tuple(signatures),
                time_ns=time_ns,
                in_block=bool(re.search(r"\.(layer|h|layers)\.0", row["meta"])),
                machine=machine,
            )


def _operator(row: Mapping[str, str]) -> str:
    """A module's class, or a function's or method's name."""
    if row["op"] == "call_module":
        classes = re.findall(r"<class '[\w.]*?(\w+)'>", row["meta"])
        return classes[-1] if classes else ""
    name = re.search(r"(\w+)(?: of type| at 0x|>|$)", row["target"])
    return name.group(1) if name else ""


def _linear(shapes: list[Shape], out: Shape) -> Kernels:
    rows, k, n = math.prod(shapes[0][:-1]), shapes[0][-1], out[-1]
    return _product([(n,), (rows, k), (k, n)], (rows, n))


def _product(shapes: list[Shape], out: Shape) -> Kernels:
    """addmm, and its backward: two products and the bias's sum over rows."""
    bias, (m, k), (_, n) = shapes[0], shapes[1], shapes[2]
    return {
        "forward": [call("addmm", [bias, (m, k), (k, n)], [(m, n)])],
        "backward": [
            call("mm", [(m, n), (n, k)], [(m, k)]),
            call("mm", [(k, m), (m, n)], [(k, n)]),
            call("sum.dim_IntList", [(m, n)], [(1, n)], "dim=0;keepdim=1"),
        ],
        "accumulate": [call("add_.Tensor", [(k, n), (k, n)], [(k, n)])] if k * n > 1e6 else [],
    }


def _batched(shapes: list[Shape], out: Shape) -> Kernels:
    batch, m, n, k = math.prod(out[:-2]), out[-2], out[-1], shapes[0][-1]
    a, b, c = (batch, m, k), (batch, k, n), (batch, m, n)
    back = [call("bmm", [c, (batch, n, k)], [a]), call("bmm", [(batch, k, m), c], [b])]
    return {"forward": [call("bmm", [a, b], [c])], "backward": back}


def _pointwise(name: str, backward: str | None = None) -> Rule:
    def rule(shapes: list[Shape], out: Shape) -> Kernels:
        one = [call(backward, [out, out], [out])] if backward else []
        return {"forward": [call(name, shapes, [out])], "backward": one}

    return rule


def _pow(shapes: list[Shape], out: Shape) -> Kernels:
    scaled = call("mul.Tensor", [out], [out])
    back = [call("pow.Tensor_Scalar", [out], [out]), scaled, call("mul.Tensor", [out, out], [out])]
    return {"forward": [call("pow.Tensor_Scalar", [out], [out])], "backward": back}


def _mul(shapes: list[Shape], out: Shape) -> Kernels:
    tensors = [shape for shape in shapes if shape != (1,)]
    both = call("mul.Tensor", [out] * len(tensors), [out])
    return {"forward": [call("mul.Tensor", shapes, [out])], "backward": [both] * len(tensors)}


def _softmax(shapes: list[Shape], out: Shape) -> Kernels:
    back = [call("_softmax_backward_data", [out, out], [out])]
    return {"forward": [call("_softmax", [out], [out])], "backward": back}


def _layer_norm(shapes: list[Shape], out: Shape) -> Kernels:
    width, rows = (out[-1],), (*out[:-1], 1)
    back = [out, out, rows, rows, width, width]
    return {
        "forward": [call("native_layer_norm", [out, width, width], [out, rows, rows])],
        "backward": [call("native_layer_norm_backward", back, [out, width, width])],
    }


def _embedding(shapes: list[Shape], out: Shape) -> Kernels:
    """The table's size, which a lookup does not depend on, is not in the rows: one of 32,768."""
    indices = f"Float[32768,{out[-1]}];Long[{','.join(map(str, out[:-1]))}]"
    return {"forward": [FIELD.join(("aten::embedding", indices, _text(out), ""))]}


def _dropout(shapes: list[Shape], out: Shape) -> Kernels:
    kept = f"Float[{','.join(map(str, out))}];Bool[{','.join(map(str, out))}]"
    return {
        "forward": [FIELD.join(("aten::native_dropout", _text(out), kept, ""))],
        "backward": [FIELD.join(("aten::native_dropout_backward", kept, _text(out), ""))],
    }


def _contiguous(shapes: list[Shape], out: Shape) -> Kernels:
    """After a transpose of heads and length; others launch nothing."""
    if len(out) != 4:
        return {}
    batch, first, second, width = out
    strides = f"@{first * second * width},{width},{first * width},1"
    source = _text((batch, first, second, width), strides)
    return {"forward": [FIELD.join(("aten::clone", source, _text(out), ""))]}


_RULES: Mapping[str, Rule] = {
    "Linear": _linear,
    "addmm": _product,
    "matmul": _batched,
    "bmm": _batched,
    "softmax": _softmax,
    "LayerNorm": _layer_norm,
    "Dropout": _dropout,
    "Embedding": _embedding,
    "embedding": _embedding,
    "tanh": _pointwise("tanh", "tanh_backward"),
    "gelu": _pointwise("gelu", "gelu_backward"),
    "ReLU": _pointwise("relu", "threshold_backward"),
    "mul": _mul,
    "pow": _pow,
    "add": _pointwise("add.Tensor"),
    "truediv": _pointwise("div.Tensor"),
    "where": _pointwise("where.self"),
    "max": _pointwise("maximum"),
    "contiguous": _contiguous,
}
