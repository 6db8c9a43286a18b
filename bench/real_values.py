"""All ranks of a job in a few slots, with real values, against the same job really run over gloo.

Each layout of an example runs unmodified on this machine: under ``torchrun`` with as many processes
as ranks; through ``prismscale run --values real`` in two slots; and two live ranks at a time, which
hear what the others said in the slots (``--record all``) and communicate for real (``--transfers
real``). After every optimizer step ``programs/followed.py`` notes what each rank's parameters came
to, so that whatever a rank hears from others shows one step later. What each rank says to whom, how
many bytes and in which order, is compared with what torch's dispatcher tells of the real run
(``programs/overheard.py``) and with what ``prismscale run`` records of ranks that run alone.

``branches``: ``programs/branching.py`` decides by what it hears, in five ways. ``64 ranks`` and
``32 ranks``: time, memory and switches of many ranks in two slots. ``experts of balance ratio``:
memory of two live ranks beside that of eight real ones; ``steps of experts in a box``: their steps,
each with a share of a core (needs root). ``a slow device``: what it does to the step
of real ranks and of live ones.
"""

from __future__ import annotations

import sys
from functools import partial

import real_branches
import real_experts
import real_layouts
import real_scale
import real_slow
from parts import Part, run_parts

PARTS: dict[str, Part] = {
    **{layout.name: partial(real_layouts.measure, layout) for layout in real_layouts.LAYOUTS},
    "branches": real_branches.measure,
    "a slow device": real_slow.measure,
    "64 ranks, FSDP2": real_scale.llama,
    **{
        f"experts of balance ratio {ratio:g}": partial(real_experts.measure, ratio)
        for ratio in real_experts.RATIOS
    },
    "steps of experts in a box": real_experts.steps,
    "32 ranks, state of 3 budgets": real_scale.spilled,
}


if __name__ == "__main__":
    sys.exit(run_parts(PARTS, title="Real values", doc=__doc__))
