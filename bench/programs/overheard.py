"""Runs a training script and notes, on each rank, what it says to others: no part of ours.

    torchrun … bench/programs/overheard.py FOLDER SCRIPT ARGS…

torch's dispatcher tells of every communication. ``FOLDER/heard-R.jsonl`` gets a line after each
optimizer step: operation, ranks of the group, root or peer (group ranks; -1: none), bytes.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
}
"""What ``torch.distributed`` calls the operations of the dispatcher."""
ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv")


class Listener(TorchDispatchMode):
    """Sees what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func._schema.name.partition("::")[2], args, result)
        return result

    def _note(self, called: str, args: tuple[Any, ...], result: Any) -> None:
        group = next(filter(None, map(_group, args)), None)
        if group is None:
            # Waits, and what wraps tensors for the autograd.
            return
        name = NAMES[called]
        numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        peer = numbers[0] if name in ROOTED else -1
        sizes = [sum(t.nbytes for t in _tensors(a)) for a in (*args, result)]
        n_bytes = 0 if name == "barrier" else max(sizes)
        self.heard.append([name, dist.get_process_group_ranks(group), peer, n_bytes])


def _group(argument: Any) -> Any:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):
            return None
    if isinstance(argument, str):
        try:
            return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            return None
    return None


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)


def main() -> None:
    """Listen to the script."""
    folder, script, *rest = sys.argv[1:]
    path = Path(folder) / f"heard-{os.environ['RANK']}.jsonl"
    path.unlink(missing_ok=True)
    listener = Listener()

    def note(*_: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(listener.heard) + "\n")
        listener.heard.clear()

    register_optimizer_step_post_hook(note)
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).parent)
    with listener:
        runpy.run_path(script, run_name="__main__")


main()
