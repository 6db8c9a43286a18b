"""Fit the law of fused attention on public measurements, and say how well it holds.

    python tools/fit/fit_attention.py [--truth DIR]

Writes the tables of attention into ``src/prismscale/cost/kernels`` (between the lines that say so),
what the measuring programs ran besides into ``validation/kernels/harness.toml``, and residuals into
``tools/fit/attention.json``. Each GPU, implementation, direction and element type is fitted by
itself, to the least mean absolute logarithmic error of a seeded sample of the rows that are not
held out. Where there are a dozen rows, only what they can tell is fitted. What a deterministic
backward pass costs more follows from how much longer the same calls take.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fitting import (
    HARNESS,
    KERNELS,
    inline_table_of,
    minimised,
    residuals,
    rounded,
    table_of,
    truth_with,
    write_between,
    write_residuals,
)
from numpy.typing import NDArray

from prismscale.cost.kernel_profile import AttentionRoofline, KernelProfile
from prismscale.validation.kernels.attention_rows import (
    BACKWARD,
    DETERMINISTIC,
    AttentionRows,
    load_attention,
)
from prismscale.validation.kernels.measuring_programs import AttentionProgram

START = {
    "efficiency": (0.8, (0.05, 1.5)),
    "length_overhead": (100.0, (0.0, 2_000.0)),
    "causal_overhead": (60.0, (0.0, 1_000.0)),
    "causal_factor": (0.7, (0.4, 1.0)),
    "head_overhead": (20.0, (0.0, 200.0)),
    "wave_rounding": (0.5, (0.0, 1.0)),
    "memory_efficiency": (0.8, (0.2, 1.0)),
    "base_ns": (5_000.0, (0.0, 30_000.0)),
}
FEW = ("efficiency", "length_overhead", "causal_overhead")
COMPUTES_MASKED = ("efficiency", "length_overhead", "causal_factor")
"""Of kernels that compute much of what a causal mask leaves out: in rows that may be fitted,
cuDNN's 8-bit backward pass on an H200 takes as long with the mask as without it."""
MANY = tuple(name for name in START if name != "causal_factor")
PROGRAM_START = {
    "overhead_ns": (1_000.0, (0.0, 40_000.0)),
    "kv_passes": (1.0, (0.0, 20.0)),
    "slowdown": (1.0, (0.7, 1.5)),
}
SAMPLE, ROUNDS, SHORTEST = 900, 5, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tables that are fitted together."""

    measured_on: str
    """Profile that predicts the rows."""
    written_to: str
    """Profile that gets the constants."""
    operator: str
    table: str
    backward: bool
    dtype: str
    free: tuple[str, ...]
    fixed: Mapping[str, float]


def _few(
    measured_on: str, written_to: str, operator: str, dtype: str, **fixed: float
) -> list[Group]:
    suffix = "_fp8" if dtype == "fp8" else ""
    return [
        Group(
            measured_on=measured_on,
            written_to=written_to,
            operator=operator,
            table=operator + suffix + ("_backward" if backward else ""),
            backward=backward,
            dtype=dtype,
            free=_few_free(measured_on, operator + suffix, backward=backward, fixed=fixed),
            fixed={"wave_rounding": 0.7, **fixed},
        )
        for backward in (False, True)
    ]


def _few_free(
    measured_on: str, kernel: str, *, backward: bool, fixed: Mapping[str, float]
) -> tuple[str, ...]:
    """Constants that a dozen rows tell."""
    computes_masked = backward and (measured_on, kernel) == ("h200-sxm", "cudnn_fp8")
    free = COMPUTES_MASKED if computes_masked else FEW
    return free if "head_overhead" in fixed else (*free, "head_overhead")


def _many(gpu: str, operator: str, table: str, dtype: str) -> Group:
    return Group(
        measured_on=gpu,
        written_to=gpu,
        operator=operator,
        table=table,
        backward=False,
        dtype=dtype,
        free=MANY,
        fixed={},
    )


GROUPS = (
    *_few("a100-pcie", "a100-pcie", "flash", "bfloat16", head_overhead=23),
    *_few("a100-pcie", "a100-pcie", "cudnn", "bfloat16", head_overhead=23),
    _many("a100-80g", "flash", "flash", "bfloat16"),
    _many("h100-sxm", "flash_attn_3", "flash_3", "bfloat16"),
    _many("h100-sxm", "flash_attn_3", "flash_3_fp8", "fp8"),
    *_few("h200-sxm", "h100-sxm", "cudnn", "bfloat16", head_overhead=55),
    *_few("h200-sxm", "h100-sxm", "cudnn", "fp8", head_overhead=55),
    *_few("gb200", "b200", "cudnn", "bfloat16"),
    *_few("gb200", "b200", "cudnn", "fp8"),
)
"""Where heads of one size alone were measured, what their exponentials cost is taken from
FlashAttention's rows on the same chip."""


def main() -> int:
    """Write the files; exit code 2 where there is no truth."""
    truth = truth_with("cudnn_frontend", __doc__)
    if truth is None:
        return 2
    tables = load_attention(truth)
    written: dict[str, dict[str, AttentionRoofline]] = {}
    programs: dict[str, AttentionProgram] = {}
    found = {}
    for group in GROUPS:
        rows = [t for t in tables if _belongs(t, group)]
        roofline, used = fit(group, rows)
        if group.backward:
            roofline = in_fixed_order(group, roofline, rows, tables)
        written.setdefault(group.written_to, {})[group.table] = roofline
        for table, program in zip(rows, used, strict=True):
            if program != AttentionProgram():
                programs[f"{table.gpu} {table.dtype} {table.program}"] = program
            fitted = replace(table, measuring=program)
            error = 100 * (fitted.predicted_ns(_profile(group, roofline)) / table.time_ns - 1)
            for part, mask in (("fitted", ~table.held_out), ("held out", table.held_out)):
                long = table.shapes[1] >= 2 * SHORTEST
                found[f"{table.name} {table.program}, {part}"] = residuals(error[mask & long])
        print(group.measured_on, group.table, roofline, *used, flush=True)
    for gpu, rooflines in written.items():
        text = [f"[attention.{n}]\n{table_of(r)}" for n, r in sorted(rooflines.items())]
        write_between(KERNELS / f"{gpu}.toml", "attention", "\n".join(text))
    lines = [f'"{n}" = {inline_table_of(p)}\n' for n, p in sorted(programs.items())]
    write_between(HARNESS, "attention", "[attention]\n" + "".join(lines))
    write_residuals("attention", found)
    return 0


def fit(
    group: Group, tables: Sequence[AttentionRows]
) -> tuple[AttentionRoofline, list[AttentionProgram]]:
    """The roofline of ``group``, and its measuring programs: the first one's kernels are plain."""
    samples = [_sample(table) for table in tables]
    served = len(group.free) == len(MANY)
    names = [START[name] for name in group.free]
    of_programs = [
        PROGRAM_START[name] for i in range(len(tables)) if served for name in _program_fields(i)
    ]
    start, bounds = zip(*names, *of_programs, strict=True)

    def unpacked(x: Sequence[float]) -> tuple[AttentionRoofline, list[AttentionProgram]]:
        values = [rounded(v) for v in x]
        own = dict(zip(group.free, values, strict=False))
        rest, used = values[len(group.free) :], []
        for i in range(len(tables)):
            fields = _program_fields(i) if served else ()
            used.append(AttentionProgram(**dict(zip(fields, rest, strict=False))))
            rest = rest[len(fields) :]
        return AttentionRoofline(**{**group.fixed, **own}), used

    def loss(x: Sequence[float]) -> float:
        roofline, used = unpacked(x)
        profile = _profile(group, roofline)
        wrong = [
            np.abs(np.log(replace(s, measuring=p).predicted_ns(profile) / s.time_ns))
            for s, p in zip(samples, used, strict=True)
        ]
        return float(np.concatenate(wrong).mean())

    return unpacked(minimised(loss, start, bounds, rounds=ROUNDS))


def in_fixed_order(
    group: Group,
    roofline: AttentionRoofline,
    rows: Sequence[AttentionRows],
    tables: Sequence[AttentionRows],
) -> AttentionRoofline:
    """``roofline`` with the cost of a fixed order, by how much longer the same calls take in it."""
    ordered = [t for t in tables if _belongs(t, group, DETERMINISTIC)]
    free_ns = {shape: time for t in rows for shape, time in _fitted_times(t)}
    times = [found for table in ordered for found in _fitted_times(table)]
    pairs = [(shape, time / free_ns[shape]) for shape, time in times if shape in free_ns]
    if not pairs:
        return roofline
    shapes, longer = zip(*pairs, strict=True)
    both = {t.direction: replace(t, shapes=np.array(shapes).T) for t in (rows[0], ordered[0])}

    def loss(x: Sequence[float]) -> float:
        profile = _profile(group, replace(roofline, fixed_order_overhead=rounded(x[0])))
        ratio = both[DETERMINISTIC].predicted_ns(profile) / both[BACKWARD].predicted_ns(profile)
        return float(np.abs(np.log(ratio / np.array(longer))).mean())

    (found,) = minimised(loss, [20.0], [(0.0, 1_000.0)])
    return replace(roofline, fixed_order_overhead=rounded(found))


def _fitted_times(table: AttentionRows) -> list[tuple[tuple[float, ...], float]]:
    """Shapes and times of the rows that may be fitted."""
    free = ~table.held_out
    return [
        (tuple(shape), float(time))
        for shape, time in zip(table.shapes[:, free].T, table.time_ns[free], strict=True)
    ]


def _program_fields(index: int) -> tuple[str, ...]:
    return tuple(PROGRAM_START)[: 3 if index else 2]


def _belongs(table: AttentionRows, group: Group, direction: str = "") -> bool:
    direction = direction or (BACKWARD if group.backward else "forward")
    mine = (table.gpu, table.operator, table.direction, table.dtype)
    wanted = (group.measured_on, group.operator, direction, group.dtype)
    return not table.sustained and mine == wanted


def _profile(group: Group, roofline: AttentionRoofline) -> KernelProfile:
    """The measured GPU with ``roofline``, whichever table it takes."""
    profile = KernelProfile.load(group.measured_on)
    suffix = "_backward" if group.backward else ""
    return replace(profile, attention={f"flash{suffix}": roofline})


def _sample(table: AttentionRows) -> AttentionRows:
    """A seeded sample of the rows that may be fitted."""
    free = np.flatnonzero(~table.held_out & (table.shapes[1] >= SHORTEST))
    chosen = np.random.default_rng(0).permutation(free)[:SAMPLE]
    mask: NDArray[np.bool_] = np.zeros(len(table.time_ns), bool)
    mask[chosen] = True
    return replace(
        table,
        shapes=table.shapes[:, mask],
        time_ns=table.time_ns[mask],
        held_out=table.held_out[mask],
    )


if __name__ == "__main__":
    sys.exit(main())
