"""How much of each argument a generated kernel reads and writes.

When inductor writes a kernel, it knows which elements the kernel's nodes access. The kernel is
annotated with the number of passes over the elements of each tensor argument (0.5: half of them are
read; 2.0: all are read and written) instead of bytes, because a kernel for symbolic shapes is
launched with tensors of many sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.virtualized import V


def passes_over_arguments(kernel: Any) -> dict[str, float]:
    """Return the passes by argument name, for a ``SIMDKernel`` whose code is being written."""
    nodes = kernel.features.scheduler_nodes()
    read = _elements_by_buffer((node, _loads(node)) for node in nodes)
    written = _elements_by_buffer((node, node.read_writes.writes) for node in nodes)
    # A value that a node of this kernel wrote is still in a register and is not loaded.
    loaded = {name: elements for name, elements in read.items() if name not in written}
    names, buffers, *_ = kernel.args.python_argdefs()
    aliases = _aliases(kernel)
    passes = {}
    for name, buffer in zip((argument.name for argument in names), buffers, strict=True):
        known = {buffer, *aliases.get(name, ()), *aliases.get(buffer, ())} & {*read, *written}
        n_elements = _hint(V.graph.get_numel(buffer)) if known else 0
        if n_elements:
            accessed = [sum(by.get(alias, 0) for alias in known) for by in (loaded, written)]
            # A second access to an element is served by the caches, so it does not count.
            passes[name] = sum(min(1.0, elements / n_elements) for elements in accessed)
    return passes


def _loads(node: Any) -> Iterable[Any]:
    """Yield the dependencies of ``node`` that it reads.

    A ``StarDep`` on a buffer that the node overwrites only orders nodes, except for an atomic
    addition, which reads the buffer.
    """
    overwritten = {name for output in node.get_outputs() for name in output.get_mutations()}
    for dependency in node.read_writes.reads:
        is_order = isinstance(dependency, StarDep) and dependency.name in overwritten
        if not is_order or dependency.mode == "atomic_add":
            yield dependency


def _elements_by_buffer(accesses: Iterable[tuple[Any, Iterable[Any]]]) -> dict[str, int]:
    """Return how many elements of each buffer the nodes access; equal accesses count once."""
    found: dict[str, dict[Any, int]] = {}
    for node, dependencies in accesses:
        for dependency in dependencies:
            if isinstance(dependency, (MemoryDep, StarDep)):
                elements = _elements(node, dependency)
                found.setdefault(dependency.name, {})[dependency] = elements
    return {buffer: sum(elements.values()) for buffer, elements in found.items()}


def _elements(node: Any, dependency: MemoryDep | StarDep) -> int:
    if isinstance(dependency, MemoryDep) and not dependency.is_indirect():
        return _hint(dependency.get_numel())
    # A lookup or scatter depends on a whole table, but accesses at most one element of it for each
    # element that the node computes.
    _, (outer, inner) = node.group
    return _hint(outer) * _hint(inner)


def _aliases(kernel: Any) -> dict[str, set[str]]:
    """Return buffers that share memory.

    An argument that is both read and written maps to the buffers in it. An overwritten buffer maps
    to the buffers that overwrite it.
    """
    found: dict[str, set[str]] = {}
    for shared in kernel.args.inplace_buffers.values():
        if hasattr(shared, "inner_name"):  # not removed
            found[shared.inner_name] = set(shared.other_names)
    for node in kernel.features.scheduler_nodes():
        for output in node.get_outputs():
            for overwritten in output.get_mutations():
                found.setdefault(overwritten, set()).add(output.get_name())
    return found


def _hint(size: Any) -> int:
    sizes: Any = V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
    return int(hint(size, fallback=1))
