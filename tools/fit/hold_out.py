"""Draw the list of kernel measurements that no constant may be fitted on.

    python tools/fit/hold_out.py [--truth DIR]

Prints ``src/prismscale/validation/kernels/held_out.toml``, which was drawn once, before anything
was fitted, and is not drawn anew when constants move. Rows are held out by family, never one by
one: neighbours of a shape give its time away. The rule: of each set, the share of the families
(rounded up) whose SHA-256 of seed, set and name is the smallest; and all of the sets in ``whole``.
Families by set:

=========================  =============================================================
aiconfigurator_gemm        (N, K) of a product, whatever its M, element type, GPU, framework
aiconfigurator_attention   heads, key/value heads and head size
aiconfigurator_moe         hidden size, expert size, number of experts
aiconfigurator_moe_cutlass the same, of CUTLASS's rows: none of its families is among those above
aiconfigurator_quantise    width of a row
simumax_products           the three extents of a product, in any order: forward, dgrad, wgrad
simumax_attention          heads, key/value heads, head sizes
cudnn_attention            model, mask and length
cudnn_norms                model
liger                      kernel and GPU
vidur                      model
neusight                   model
tracelens                  nothing of it is fitted
=========================  =============================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fitting import truth_with

from prismscale.validation.kernels.public_tables import table_rows

LAYER = "hidden={hidden_size},inter={inter_size},experts={num_experts}"
SEED, SHARE, WHOLE = "prismscale kernels 1", 0.3, ("tracelens",)


def main() -> int:
    """Print the list; exit code 2 where there is no truth."""
    truth = truth_with("aiconfigurator", __doc__)
    if truth is None:
        return 2
    print("# Families of public kernel measurements that no constant is fitted on. Drawn by")
    print("# tools/fit/hold_out.py before anything was fitted; never drawn anew.")
    print(f'seed = "{SEED}"\nshare = {SHARE}\nwhole = {json.dumps(WHOLE)}\n\n[families]')
    for rows, families in families_of(truth).items():
        held = drawn(SEED, SHARE, rows, families)
        print(f"# {len(held)} of {len(families)}")
        print(f"{rows} = [")
        for family in held:
            print(f'    "{family}",')
        print("]")
    return 0


def drawn(seed: str, share: float, rows: str, families: Iterable[str]) -> list[str]:
    """Those of the set ``rows`` that the rule holds out, sorted by name."""

    def digest(family: str) -> bytes:
        return hashlib.sha256(f"{seed}|{rows}|{family}".encode()).digest()

    by_digest = sorted(set(families), key=digest)
    return sorted(by_digest[: math.ceil(share * len(by_digest))])


def families_of(truth: Path) -> dict[str, set[str]]:
    """Every family of every set."""
    tables = truth / "aiconfigurator"
    return {
        "aiconfigurator_gemm": _named(tables, "*__gemm_perf__*", "n={n},k={k}"),
        "aiconfigurator_attention": _attention(tables),
        "aiconfigurator_moe": _named(
            tables,
            "*__moe_perf__*",
            LAYER,
        ),
        "aiconfigurator_moe_cutlass": _named(
            tables,
            "*__moe_perf__*",
            LAYER,
            lambda row: "cutlass" in row["kernel_source"] and row["moe_dtype"] == "bfloat16",
        ),
        "aiconfigurator_quantise": {
            *_named(tables, "*__computescale_perf__*", "k={k}"),
            *_named(tables, "*__scale_matrix_perf__*", "k={k}"),
        },
        **_simumax(truth / "simumax_b200" / "measured_operators.json"),
        "cudnn_attention": _cudnn_attention(truth / "cudnn_frontend"),
        "cudnn_norms": _named(truth / "cudnn_frontend", "norms__*", "{norm_name}"),
        "liger": _named(truth / "liger", "*.csv", "{kernel_name},{gpu_name}"),
        "vidur": {_vidur(p) for p in (truth / "vidur").glob("compute__*")},
        "neusight": {p.name.split("-")[0] for p in (truth / "neusight/label").glob("*/*.csv")},
    }


def _named(
    folder: Path,
    pattern: str,
    name: str,
    chosen: Callable[[Mapping[str, str]], bool] = lambda row: True,
) -> set[str]:
    return {
        name.format(**row)
        for path in folder.glob(pattern)
        for row in table_rows(path)
        if row.get("success", "True") == "True" and chosen(row)
    }


def _attention(tables: Path) -> set[str]:
    name = "heads={num_heads},kv={num_key_value_heads},size={head_dim}"
    unmasked = "heads={num_heads},kv={num_heads},size={head_dim}"
    return {
        *_named(tables, "*__context_attention_perf__*", name),
        *_named(tables, "*__encoder_attention_perf__*", unmasked),
    }


def _simumax(path: Path) -> dict[str, set[str]]:
    operators = json.loads(path.read_text(encoding="utf-8"))["accelerator"]["op"]
    products, attention = set(), set()
    for kind, about in operators.items():
        for text in about.get("accurate_efficient_factor") or ():
            stated = dict(re.findall(r"(\w+)=(\w+)", text))
            if kind.startswith("sdp"):
                sizes = f"{stated['qk_head_dim']}/{stated['v_head_dim']}"
                attention.add(f"heads={stated['head_num']},kv={stated['kv_head_num']},size={sizes}")
            else:
                extents = sorted(int(stated.get(e) or stated[e.upper()]) for e in "mnk")
                products.add("x".join(map(str, extents)))
    return {"simumax_products": products, "simumax_attention": attention}


def _cudnn_attention(folder: Path) -> set[str]:
    excerpt = _named(folder, "attention_training__*", "llama3.1,{mask},{seqlen}")
    others = _named(folder, "sdpa_benchmark_training__*", "{model_name},{attn_mask},{q_seqlen}")
    return {*excerpt, *others}


def _vidur(path: Path) -> str:
    return path.name.split("__")[3]


if __name__ == "__main__":
    sys.exit(main())
