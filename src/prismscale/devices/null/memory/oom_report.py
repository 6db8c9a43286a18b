"""Report of who holds the memory of a null device that ran out of it.

The allocator model knows which op allocated a block. The program's own objects tell what a block
holds; they are searched only when memory has run out.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator

from prismscale.devices.null.memory import memory_stats
from prismscale.devices.null.memory.memory_owners import ProgramObjects
from prismscale.devices.null.memory.memory_stats import LiveBlock

MOST_BLOCKS = 6
"""Most groups of blocks without an owner that are listed one by one; the rest is summed up."""


def occupants(library: ctypes.PyDLL, device: int) -> list[str]:
    """Describe what occupied ``device`` when it last ran out of memory, one group to a line.

    The program's own tensors come first.
    """
    owners = ProgramObjects().owners()
    owned: dict[str, list[tuple[int, str]]] = {}
    others: Counter[tuple[str, int]] = Counter()
    for block in memory_stats.blocks_at_out_of_memory(library, device):
        owner = owners.get(block.address)
        if owner is None:
            others[_made_by(block), block.size_bytes] += 1
        else:
            owned.setdefault(owner.kind, []).append((block.size_bytes, owner.name))
    return [*_owned_lines(owned), *_other_lines(others)]


def _owned_lines(owned: dict[str, list[tuple[int, str]]]) -> Iterator[str]:
    for kind, blocks in owned.items():
        size, name = max(blocks)
        total = sum(size for size, _ in blocks)
        count = f"{len(blocks):,} of them" if len(blocks) > 1 else "one"
        yield f"{_mib(total)}  {kind}: {count}, the largest {_mib(size).strip()} of {name}"


def _other_lines(others: Counter[tuple[str, int]]) -> Iterator[str]:
    ranked = sorted(others.items(), key=lambda item: -item[0][1] * item[1])
    for (made_by, size), count in ranked[:MOST_BLOCKS]:
        yield f"{_mib(count * size)}  {count:,} × {_mib(size).strip()} made by {made_by}"
    rest = sum(size * count for (_, size), count in ranked[MOST_BLOCKS:])
    if rest:
        yield f"{_mib(rest)}  {sum(n for _, n in ranked[MOST_BLOCKS:]):,} smaller ones"


def _made_by(block: LiveBlock) -> str:
    shape = block.outputs.partition(";")[0]
    return f"{block.made_by} → {shape}" if shape else block.made_by


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:10,.1f} MiB"
