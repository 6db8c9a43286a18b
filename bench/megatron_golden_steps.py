"""Megatron-LM's records of step times on H100s, by the programs that gave them.

    python bench/megatron_golden_steps.py --megatron CLONE [--truth DIR] [--case NAME]…
                                          [--work DIR] [--json PATH]

A record is what a functional test of Megatron-LM logged on eight GPUs. It is run as
``megatron_goldens.py`` runs it, with the code, options and Transformer Engine of the commit that
brought its values, through ``prismscale run``. Its step is held against the median of those that
the test logged. The models are small: the host decides most of these steps.

Left out are tests whose number of GPUs is not public, of reinforcement learning, and of images
that the bench cannot make. Records that an A100 gave, by the name that the file had then, are named
and not scored. Routers spread tokens evenly here, and text is made up.

The Python of this bench is that of ``scripts/megatron-environment``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_goldens import Bench, Golden, arguments, is_asked, load_goldens
from megatron_history import Repository
from prismscale.validation.error_rows import error_rows
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from prismscale.validation.steps.golden_rows import FAMILIES, GPU, GoldenStep, load_golden_steps
from prismscale.validation.steps.measured import GOLDEN
from runs import median_row, our_commit, provenance

STEP = ": step "


def measure(golden: Golden, record: GoldenStep, bench: Bench) -> list[Row]:
    """The rows of one record."""
    origin = bench.origin(golden)
    runs, script = bench.program(golden, origin)
    job = ("--device", "null", "--cluster", origin.cluster, "--world-size", golden.world_size)
    found = runs.run(f"{golden.name}-steps", job, script)
    by = f"{origin.commit[:10]}, Transformer Engine {origin.transformer_engine}"
    if not found:
        missed = Row.at_least(f"{golden.name}: completes, {by}", 0, 1)
        return [replace(missed, note=f"prismscale {our_commit()}; {runs.reason}")]
    step_ms = found["step_ns"] / 1e6
    error = 100 * (step_ms / record.step_ms - 1)
    if origin.cluster != GPU:
        name = f"{golden.name}: an A100's, {step_ms:,.2f} of {record.step_ms:,.2f} ms, {by}"
        return [replace(Row.told(name, error, "%"), note=f"prismscale {our_commit()}")]
    mark = "" if record.is_scored else ", not scored"
    name = f"{golden.name}{STEP}{step_ms:,.2f} of {record.step_ms:,.2f} ms, {by}{mark}"
    row = replace(Row.told(name, error, "%"), note=provenance(found, GOLDEN, GPU))
    return [row, *median_row(golden.name, found)]


def scores(rows: Sequence[Row], records: Sequence[GoldenStep]) -> Iterator[Row]:
    """Errors of the steps without variation, by family."""
    error = {row.subject: row.value for row in rows if STEP in row.name}
    for family in FAMILIES.values():
        names = [r.name for r in records if r.family == family and r.name in error]
        yield from error_rows(family, [error[name] for name in names], of="steps")


def main() -> int:
    """Run the records, print the table, and write it where asked; returns the exit code."""
    given = arguments(__doc__)
    records = {record.name: record for record in load_golden_steps(given.truth)}
    goldens = [
        golden
        for golden in load_goldens(given.truth / "megatron_golden" / "cases")
        if golden.name in records and is_asked(golden, given)
    ]
    rows = [row for row in read_rows(given.json) if row.subject in records]
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(work, Repository(given.megatron))
        for golden in goldens:
            found = measure(golden, records[golden.name], bench)
            print(*(f"{r.name}: {r.value:.4g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if given.json:
                write_rows([*rows, *scores(rows, [*records.values()])], given.json)
    rows += scores(rows, [*records.values()])
    return finish(rows, title="Megatron-LM's records of steps", json_path=given.json)


if __name__ == "__main__":
    sys.exit(main())
