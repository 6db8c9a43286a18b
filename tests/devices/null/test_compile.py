"""torch.compile lowers on the null device: what runs, what is kept, and what it costs."""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null.compiled import eager_regions
from prismscale.devices.null.runtime import active
from prismscale.devices.null.value_policy import known
from support import op_log
from support.deterministic import deterministic
from support.inductor_schedule import scheduled_kernels
from support.null_program import null_program

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs Triton"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own, on its import and while it compiles
]
GENERATED = "inductor::triton_"


CALL = "inductor::call"


def ops_of(run: Callable[[], object]) -> list[op_log.OpSignature]:
    """What ``run`` launches, after a call that compiled it; not the calls of compiled graphs."""
    run()
    return [op.signature for op in op_log.ops_of(run) if op.signature.name != CALL]


def generated(ops: list[op_log.OpSignature]) -> list[int]:
    """Bytes of the generated kernels among ``ops``."""
    return [op.arguments["traffic_bytes"][0] for op in ops if op.name.startswith(GENERATED)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    """A tensor of the null device."""
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


class SwiGlu(nn.Module):
    """RMSNorm of elementary operators, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"device": "cuda", "dtype": torch.bfloat16}
        self.weight = nn.Parameter(torch.ones(256, **sizes))
        self.gate, self.up = (nn.Linear(256, 512, bias=False, **sizes) for _ in range(2))
        self.down = nn.Linear(512, 256, bias=False, **sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With the residual."""
        wide = x.float()
        inner = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        inner = inner * self.weight
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Experts(nn.Module):
    """Tokens that are sent to one expert each, in a grouped product, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(256, 4, bias=False, device="cuda", dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.empty(4, 256, 256, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (tokens, 256)."""
        score, expert = self.router(x).float().softmax(-1).max(-1)
        order = expert.argsort()
        ends = torch.cumsum(functional.one_hot(expert, 4).sum(0), 0).to(torch.int32)
        sent = (x * score.to(x.dtype)[:, None])[order]
        found = functional.silu(torch._grouped_mm(sent, self.weight, offs=ends))
        return x + torch.zeros_like(x).index_add(0, order, found)


@pytest.mark.parametrize("block", [SwiGlu, Experts])
def test_the_kernels_of_inductors_schedule_are_launched_with_their_bytes(
    block: type[nn.Module],
) -> None:
    """One launch for each scheduled kernel, forward and backward; bytes within 5 %."""
    compiled, x = torch.compile(block()), random(128, 256)
    with scheduled_kernels() as scheduled:
        compiled(x).sum().backward()
    found = generated(ops_of(lambda: compiled(x).sum().backward()))

    assert len(found) == len(scheduled)
    assert sum(found) == pytest.approx(sum(kernel.n_bytes for kernel in scheduled), rel=0.05)


def test_inductors_options_hold_where_backward_graphs_are_compiled() -> None:
    """The engine's own thread compiles them: it must start no other process, and roll no allocator
    back."""
    from torch._inductor import config  # seconds to import

    seen = []

    def note(gradient: torch.Tensor) -> None:
        seen.append((threading.get_ident(), config.compile_threads, config.triton.cudagraph_trees))

    x = random(8, 8)
    x.register_hook(note)
    (x * 2).sum().backward()

    ((thread, compile_threads, has_trees),) = seen
    assert thread != threading.get_ident()
    assert (compile_threads, has_trees) == (1, False)


def test_products_stay_operators_of_aten() -> None:
    """Inductor calls the library for them, the last with the residual."""
    compiled, x = torch.compile(SwiGlu()), random(128, 256)
    names = [op.name for op in ops_of(lambda: compiled(x)) if not op.name.startswith(GENERATED)]

    assert names == ["aten::mm.out", "aten::mm.out", "aten::addmm.out"]


def test_each_graph_is_called_once_forward_and_once_backward() -> None:
    """The host is busy with a call for as long as with an operator, however many kernels follow."""
    compiled, x = torch.compile(SwiGlu()), random(128, 256)
    compiled(x).sum().backward()
    ops = op_log.ops_of(lambda: compiled(x).sum().backward())
    names = [op.signature.name for op in ops]

    assert names.count(CALL) == 2
    assert sum(name.startswith(GENERATED) for name in names) > 2


def test_the_partitioner_decides_what_is_kept() -> None:
    """Eager keeps the argument of each operator; compiled, the first is enough to compute again."""
    x = random(1024, 1024, dtype=torch.float32)

    def kept(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
        function(x)
        gc.collect()
        before = torch.cuda.memory_allocated()
        found = function(x)
        return torch.cuda.memory_allocated() - before - found.nbytes

    def waves(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().sin()

    assert kept(waves) == 2 * x.nbytes
    assert kept(torch.compile(waves)) == 0


def test_a_slice_is_charged_by_what_is_read() -> None:
    """Not by the tensor in which it lies."""
    compiled = torch.compile(lambda x: x[:, :64].cos())
    wide = random(1024, 1024, dtype=torch.float32, grad=False)

    assert generated(ops_of(lambda: compiled(wide))) == [2 * 1024 * 64 * 4]


def test_a_lookup_is_charged_by_what_it_looks_up() -> None:
    """Forward and, where rows are added up (read and written), backward: not by the table."""
    table = nn.Embedding(50_000, 64, device="cuda")
    compiled = torch.compile(lambda tokens: table(tokens))
    tokens = torch.zeros(128, dtype=torch.int64, device="cuda")
    rows, whole = 128 * 64 * 4, table.weight.nbytes
    forward, cleared, added = generated(ops_of(lambda: compiled(tokens).sum().backward()))

    assert (forward, cleared, added) == (128 * 8 + 2 * rows, whole, 128 * 8 + 3 * rows)


def test_a_number_that_a_generated_kernel_writes_is_known() -> None:
    """What ``torch.tensor([n])`` became, asked for after a collective would have run; not what a
    kernel computes of it."""

    @torch.compile
    def count(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([x.shape[0]], device="cuda"), x + 1

    rows, moved = count(random(48, 2))
    assert rows.item() == 48
    assert known(rows) is not None
    assert known(moved) is None


def test_symbolic_shapes_are_charged_by_the_sizes_of_each_launch() -> None:
    """One compiled kernel for all of them."""
    compiled = torch.compile(lambda x: torch.relu(x) + 1, dynamic=True)
    sizes = (10, 20, 33)
    found = [
        generated(ops_of(lambda n=n: compiled(random(n, 8, grad=False))))[0]  # type: ignore[misc]
        for n in sizes
    ]
    assert found == [2 * 2 * 8 * n for n in sizes]


def test_compiling_takes_no_logical_time() -> None:
    """The first call of a compiled function takes what the second does."""
    compiled, x = torch.compile(SwiGlu()), random(128, 256)
    now_ns = active().library.ps_host_time_ns
    taken = []
    for _ in range(2):
        began = now_ns()
        compiled(x)
        taken.append(now_ns() - began)

    assert taken[0] == taken[1] > 0


def test_reduced_overhead_replays_graphs() -> None:
    """One for each forward and backward pass: kernels are those of the region without graphs."""
    model, x = SwiGlu(), random(128, 256)
    plain = [op.name for op in ops_of(lambda: torch.compile(model)(x))]
    graphed = torch.compile(model, mode="reduce-overhead")
    names = [op.name for op in ops_of(lambda: graphed(x))]

    assert [name for name in names if name != "aten::copy_"] == ["cuda::graph_launch", *plain]


def test_tuning_takes_the_librarys_product() -> None:
    """The first of the choices; nothing is timed."""
    compiled = torch.compile(lambda x, w: torch.relu(x @ w), mode="max-autotune-no-cudagraphs")
    first, second = random(256, 512, grad=False), random(512, 1024, grad=False)
    names = [op.name for op in ops_of(lambda: compiled(first, second))]

    assert names == ["aten::mm.out", "inductor::triton_poi_fused_relu_0"]


def test_templates_of_products_cost_what_products_do() -> None:
    """Where the library is switched off."""
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    compiled = torch.compile(lambda x, w: x @ w, options=options)
    factors = random(4096, 4096, grad=False), random(4096, 4096, grad=False)
    library, model = active().library, load_kernel_model("h100-sxm")
    costs = []
    for run in (compiled, torch.mm):
        run(*factors)
        *_, number = op_log.ops_of(partial(run, *factors)).signatures  # a graph is called before
        costs.append(model.cost(library.ps_signature(number).decode()))

    assert costs[0].kind == costs[1].kind == "gemm"
    assert costs[0].device_ns == costs[1].device_ns


def test_a_kernel_of_the_programs_own_is_the_op_that_it_is_without_compile() -> None:
    """With the products that its source says, on the grid that it asks for."""
    from support import triton_kernels

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
        sizes = {"PRECISION": "tf32", "BM": 64, "BN": 64, "BK": 32}
        grid = (len(a) // 64 * (b.shape[1] // 64),)
        triton_kernels.matmul[grid](a, b, out, len(a), b.shape[1], len(b), **sizes)
        return out

    factors = random(512, 1024, grad=False), random(1024, 256, grad=False)
    (plain,) = [op for op in ops_of(lambda: run(*factors)) if op.name.startswith("triton::")]
    (own,) = ops_of(lambda: torch.compile(run)(*factors))

    assert own == plain
    assert own.arguments["extents"] == (8 * 4, 64, 64, 1024)


def test_a_region_may_ask_for_the_gpus_properties() -> None:
    """They are constants to dynamo, as on a GPU: no graph break."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x + torch.cuda.get_device_properties("cuda").multi_processor_count

    spread_whole = torch.compile(spread, fullgraph=True)
    assert len(generated(ops_of(lambda: spread_whole(random(64, grad=False))))) == 1


def test_flex_attention_is_the_op_that_it_is_without_compile() -> None:
    """Inductor's templates would take their work from a mask without values."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")
    compiled = torch.compile(flex_attention)
    heads = [random(2, 4, 256, 64) for _ in range(3)]
    names = [op.name for op in ops_of(lambda: compiled(*heads, block_mask=mask).sum().backward())]

    assert [name for name in names if name.startswith("prismscale_null")] == [
        "prismscale_null::flex_attention",
        "prismscale_null::flex_attention_backward",
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_other_backends_run_operators(backend: str) -> None:
    """Those that generate nothing: the same as without."""
    model, x = SwiGlu(), random(128, 256)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = [op.name for op in ops_of(lambda: model(x))]
    found = [op.name for op in ops_of(lambda: compiled(x))]

    assert not any(name.startswith(GENERATED) for name in found)
    assert found.count("aten::mm") == eager.count("aten::mm") == 3


def test_what_inductor_cannot_lower_runs_operator_by_operator(monkeypatch: Any) -> None:
    """And is named, with the reason."""
    from torch._inductor import lowering

    def fail(*_: object) -> None:
        raise NotImplementedError("no cosine here")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.cosh.default, fail)
    compiled = torch.compile(lambda x: x.cosh() + 1)
    x = random(64, grad=False)
    names = [op.name for op in ops_of(lambda: compiled(x))]

    assert names == ["aten::cosh", "aten::add.Tensor"]
    region = eager_regions.found()[-1]
    assert "test_compile.py" in region.region
    assert "no cosine here" in region.reason


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_sizes_that_follow_from_values_are_those_of_the_operators() -> None:
    """Operators know how many tokens an expert gets, generated kernels would not."""

    def sent(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(experts.float(), bins=4, min=0, max=4).long().tolist()
        return x[: counts[0]] * 2

    experts = random(64, 4, grad=False).topk(2).indices
    compiled = torch.compile(sent)

    assert compiled(random(64, 8, grad=False), experts).shape == (32, 8)
    assert "sizes follow from values" in eager_regions.found()[-1].reason


def test_a_second_process_finds_what_was_compiled(tmp_path: Any) -> None:
    """Graphs and their kernels lie in the user's cache."""
    text = (
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device='cuda'))\n"
        "print(counters['inductor']['fxgraph_cache_hit'] or counters['aot_autograd']"
        "['autograd_cache_hit'])\n"
    )
    first, second = (null_program(text, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) for _ in range(2))

    assert (first.strip(), second.strip()) == ("0", "1")


def test_buffers_of_generated_code_are_not_filled() -> None:
    """A deterministic program's own ``empty`` is, and generated code takes its memory by itself."""
    module = torch.compile(SwiGlu())
    x = random(64, 256)
    plain = [op.name for op in ops_of(lambda: module(x))]
    with deterministic():
        assert [op.name for op in ops_of(lambda: module(x))] == plain
