"""Programs that nobody here wrote, on the null device: what each of them shows.

    python bench/null_matrix.py [--case NAME]… [--json PATH] [--against PATH]

Run with a Python that has torchtitan 0.3.0, megatron-core 0.16.1, accelerate, transformers and
DeepSpeed beside prismscale (``make test-frameworks`` makes one); Transformer Engine's Python code
is installed by hand (docs/null-device.md). A case whose package is missing
is left out, and said so. The matrix may be run in pieces: PATH keeps the rows of cases that a run
leaves out, and has those of a case as soon as it is done. Models are small: the matrix shows that a
parallelism runs through the program's own code at a real world size, not how fast or how large a
real model is. ``--against`` holds communication and peak memory against the rows that another build
of torch gave: where a program takes the same path, they are the same.

What ZeRO-3 holds between two steps stands beside what ZeRO's authors give: 2 bytes of parameter, 2
of gradient and 12 of optimizer for each parameter, over all ranks (arXiv:1910.02054, section 3.1).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from null_programs import GIB, prepare, reserved_bytes
from prismscale.analysis.emulated import Emulated
from prismscale.cost.kernel_signature import FIELD
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.runfolder import RunFolder
from prismscale.validation.rows import Row, finish, read_rows, write_rows
from runs import EXAMPLES, HERE, PARTIAL, TITAN, Program, Runs, folder_name, is_installed

LIMIT_S = 240
COMMUNICATION, PEAK = "digest of communication", "peak"
DIFFERENCE = "difference from"


@dataclass(frozen=True, kw_only=True)
class Case(Program):
    """A script of a framework at one layout."""

    more: Callable[[Path], list[Row]] | None = None
    """Rows of its own, from the run folder."""

    def owns(self, row: Row) -> bool:
        """Whether ``row`` is one of this case."""
        return row.name.startswith((f"{self.name}:", f"{self.name}, {self.world_size} ranks:"))


def titan(
    name: str, world_size: int, module: str, config: str, *more: str, **layout: object
) -> Case:
    """torchtitan with ``layout`` as its ``--parallelism`` options."""
    pairs = ((f"--parallelism.{key}", str(value)) for key, value in layout.items())
    return Case(
        name=f"torchtitan {name}",
        package="torchtitan",
        world_size=world_size,
        script=TITAN,
        args=(
            *("--module", module, "--config", config, "--hf_assets_path", "./tokenizer"),
            *PARTIAL,
            *("--training.seq_len", "512", "--training.local_batch_size", "4"),
            *("--training.steps", "6", "--metrics.log_freq", "1"),
            *(text for pair in pairs for text in pair),
            *more,
        ),
    )


def megatron(name: str, world_size: int, options: str) -> Case:
    """megatron-core through the example trainer."""
    shape = """--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --bf16
        --micro-batch-size 1 --train-iters 6 --vocab-size 32000 --attention-dropout 0
        --no-masked-softmax-fusion"""
    return Case(
        name=f"megatron-core {name}",
        package="megatron",
        world_size=world_size,
        script=EXAMPLES / "megatron" / "train.py",
        args=(*shape.split(), *options.split()),
    )


def example(
    name: str,
    package: str,
    world_size: int,
    options: str,
    more: Callable[[Path], list[Row]] | None = None,
) -> Case:
    """One of the examples that stands for its framework."""
    return Case(
        name=name,
        package=package,
        world_size=world_size,
        script=EXAMPLES / package / "train.py",
        args=tuple(options.split()),
        more=more,
    )


ZERO_LAYERS, ZERO_HIDDEN, ZERO_VOCABULARY, ZERO_RANKS = 4, 1024, 32_000, 16
ZERO = f"--layers {ZERO_LAYERS} --hidden {ZERO_HIDDEN} --vocabulary {ZERO_VOCABULARY} --heads 16"

CUBLAS_BYTES = 2 * 32 * 2**20
"""Workspaces on Hopper: one for each thread that multiplies, forward and backward."""


def zero_states(out: Path) -> list[Row]:
    """Bytes of rank 0 between two steps, for each parameter of its share, cuBLAS's aside."""
    log = (out / "logs" / "capture-rank-0.log").read_text()
    allocated = int(re.findall(r"allocated (\d+)", log)[-1])
    layer = 4 * ZERO_HIDDEN**2 + 3 * 4 * ZERO_HIDDEN**2 + 2 * ZERO_HIDDEN
    parameters = ZERO_LAYERS * layer + (2 * ZERO_VOCABULARY + 1) * ZERO_HIDDEN
    each = (allocated - CUBLAS_BYTES) * ZERO_RANKS / parameters
    return [Row.told("DeepSpeed, ZeRO-3: held for a parameter (formula 16)", each, "bytes")]


def masked_attention(out: Path, expected: int) -> list[Row]:
    """Whether attention takes a mask: inputs are then four, queries, keys, values and the mask."""
    (path,) = out.glob("captures/*/rank-0.null.json")
    uses = [u for u in Emulated.load(path).kernels if u.kind == "attention"]
    masked = sum(u.calls for u in uses if u.signature.split(FIELD)[1].count(";") == 3)
    name = "Hugging Face Trainer" + (", padded" if expected else "")
    off = abs(masked - expected)
    return [
        Row.told(f"{name}: attention kernels", sum(u.calls for u in uses)),
        Row.at_most(f"{name}: attention kernels with a mask, off by", off, 0),
    ]


def trainer(name: str, *args: str, masked: int) -> Case:
    """Hugging Face's Trainer over four layers."""
    return Case(
        name=name,
        package="transformers",
        world_size=8,
        script=HERE / "trainer_program.py",
        args=args,
        more=partial(masked_attention, expected=masked),
    )


LLAMA = ("llama3", "llama3_debugmodel")
TENSOR, PIPELINE, EXPERT = (f"{axis}_parallel_degree" for axis in ("tensor", "pipeline", "expert"))


def pipelined(schedule: str) -> Case:
    """A Llama in two stages for each rank of the pipeline.

    Without checkpointing: torch refuses a backward in two parts over selectively kept activations.
    """
    layout = {PIPELINE: 2, "pipeline_parallel_schedule": schedule}
    none = "activation-checkpoint:none"
    return titan(f"Llama-3, PP 2, {schedule}", 16, *LLAMA, none, **layout)


PROGRAMS = (
    Case(
        name="DDP with a Triton kernel",
        package="triton",
        world_size=16,
        script=HERE / "triton_program.py",
        args=(),
    ),
    titan(
        "Llama-3, HSDP 2 x 4, TP 2, full checkpointing",
        16,
        *(*LLAMA, "activation-checkpoint:full"),
        **{"data_parallel_replicate_degree": 2, TENSOR: 2},
    ),
    titan(
        "Llama-3, CP 4, FSDP 4, no checkpointing",
        16,
        *(*LLAMA, "activation-checkpoint:none"),
        context_parallel_degree=4,
    ),
    titan("Llama-3, torch.compile", 16, *LLAMA, "--compile.enable"),
    pipelined("InterleavedZeroBubble"),
    pipelined("ZBVZeroBubble"),
    pipelined("DualPipeV"),
    titan("DeepSeek-V3, EP 4", 16, "deepseek_v3", "deepseek_v3_debugmodel", **{EXPERT: 4}),
    titan(
        "DeepSeek-V3, EP 4, TP 2, PP 2",
        32,
        *("deepseek_v3", "deepseek_v3_debugmodel"),
        **{EXPERT: 4, TENSOR: 2, PIPELINE: 2},
    ),
    titan("Qwen3 MoE, EP 4, TP 2", 16, "qwen3", "qwen3_moe_debug", **{EXPERT: 4, TENSOR: 2}),
    megatron(
        "GPT, TP 2, PP 2, VPP 2, distributed optimizer",
        16,
        """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --global-batch-size 16""",
    ),
    megatron(
        "GPT, TP 2, CUDA graphs of its own",
        16,
        """--tensor-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 32
        --cuda-graph-impl local""",
    ),
    megatron(
        "MoE, EP 4, alltoall, distributed optimizer",
        16,
        """--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall
        --use-distributed-optimizer --global-batch-size 32 --disable-bias-linear""",
    ),
    replace(
        megatron(
            "Transformer Engine, TP 2 with sequence parallelism, PP 2",
            64,
            """--transformer-impl transformer_engine --tensor-model-parallel-size 2
            --sequence-parallel --pipeline-model-parallel-size 2 --swiglu --disable-bias-linear
            --normalization RMSNorm --position-embedding-type rope --use-distributed-optimizer
            --global-batch-size 32""",
        ),
        package="transformer_engine",
    ),
    replace(
        megatron(
            "Transformer Engine, MoE, EP 4, alltoall, grouped products",
            16,
            """--transformer-impl transformer_engine --num-experts 8 --moe-grouped-gemm
            --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall
            --use-distributed-optimizer --global-batch-size 32 --disable-bias-linear""",
        ),
        package="transformer_engine",
    ),
    megatron(
        "MoE, EP 4, PP 2, allgather",
        16,
        """--num-experts 8 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2
        --global-batch-size 32 --disable-bias-linear""",
    ),
    trainer("Hugging Face Trainer", masked=0),
    trainer("Hugging Face Trainer, padded", "--padded", masked=4),
    example("accelerate, FSDP2", "accelerate", 16, "--steps 8 --bf16 --checkpointing"),
    example("DeepSpeed, ZeRO-2", "deepspeed", ZERO_RANKS, "--steps 8 --zero 2 --accumulate 2"),
    example(
        "DeepSpeed, ZeRO-3",
        "deepspeed",
        ZERO_RANKS,
        f"--steps 8 --zero 3 --bucket 1e6 {ZERO}",
        zero_states,
    ),
)


def communication_digest(graph: JobGraph) -> int:
    """CRC-32 of what every rank class says in a step: operation, bytes, size of the group, peer."""
    said = []
    for rank_class in graph.classes:
        trace = rank_class.trace
        for node in range(trace.n_prologue, trace.n_nodes):
            if trace.kind_N[node] == NodeKind.COMPUTE:
                continue
            size = len(trace.groups[int(trace.group_index_N[node])].ranks)
            columns = (trace.kind_N, trace.op_N, trace.bytes_N, trace.peer_N)
            said.append((rank_class.size, size, *(int(column[node]) for column in columns)))
    return zlib.crc32(repr(said).encode())


def compared(rows: Sequence[Row], path: Path) -> list[Row]:
    """Whether communication and peak are those of the rows in ``path``."""
    others = {row.name: row.value for row in read_rows(path)}
    found = []
    for row in rows:
        name, _, what = row.name.rpartition(": ")
        if row.name not in others:
            continue
        off = abs(row.value - others[row.name])
        if what == PEAK:
            found.append(Row.at_most(f"{name}: {what}, {DIFFERENCE} {path.stem}", off, 0, "bytes"))
        elif what == COMMUNICATION:
            # How far two digests are apart says nothing.
            found.append(Row.at_most(f"{name}: {what}, {DIFFERENCE} {path.stem}", bool(off), 0))
    return found


def run(program: Case, runs: Runs) -> list[Row]:
    """Run one program through the command line."""
    out = folder_name(program.name)
    began = time.monotonic()
    found = runs.null(out, program.world_size, (program.script, *program.args))
    wall_s = time.monotonic() - began
    if not found:
        return [Row.at_least(f"{program.name}: completes", 0, 1)]
    root = runs.folder / out
    reserved = reserved_bytes(root, found["captured"]) / GIB
    graph = load_graph(RunFolder(root=root).graph)
    peak = max(stage["peak_bytes"] or 0 for stage in found["stages"])
    return [
        Row.at_least(f"{program.name}, {program.world_size} ranks: completes", 1, 1),
        Row.told(f"{program.name}: wall time", wall_s, "s"),
        Row.told(f"{program.name}: step", found["step_ns"] / 1e6, "ms"),
        Row.told(f"{program.name}: {PEAK}", peak, "bytes"),
        Row.told(f"{program.name}: reserved", reserved, "GiB"),
        Row.told(f"{program.name}: {COMMUNICATION}", communication_digest(graph)),
        *(program.more(root) if program.more else []),
    ]


def rows_kept(path: Path | None, chosen: Sequence[Case]) -> list[Row]:
    """What earlier runs wrote to ``path`` about cases that are not run now."""
    others = [program for program in PROGRAMS if program not in chosen]
    rows = (
        row for row in read_rows(path) if not row.name.rpartition(", ")[2].startswith(DIFFERENCE)
    )
    return [row for row in rows if any(program.owns(row) for program in others)]


def main() -> int:
    """Run the cases, print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", action="append", help="part of a name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--against", type=Path, help="rows of another build of torch")
    options = parser.parse_args()
    chosen = [p for p in PROGRAMS if any(part in p.name for part in options.case or [""])]
    rows = rows_kept(options.json, chosen)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if is_installed("tokenizers") and not (folder / "tokenizer").exists():
            prepare(folder)
        for program in chosen:
            if not program.is_installed:
                continue
            found = run(program, Runs(folder, limit_s=LIMIT_S))
            print(*(f"{r.name}: {r.value:g} {r.unit}" for r in found), sep="\n", flush=True)
            rows += found
            if options.json:
                write_rows(rows, options.json)
    if options.against:
        rows += compared(rows, options.against)
    return finish(rows, title="Frameworks on the null device", json_path=options.json)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
