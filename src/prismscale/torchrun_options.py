"""Translates ``torchrun``'s own options, which stand before the program, into prismscale's.

So a command line that starts a job can be given to prismscale with one word replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.errors import UsageError

_SIZES = ("--nnodes", "--nproc-per-node")
_PLACES = (
    *("--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--master-addr", "--master-port", "--local-addr", "--max-restarts", "--monitor-interval"),
    *("--start-method", "--role", "--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
    *("--logs-specs", "--numa-binding", "--signals-to-handle", "--event-log-handler", "-r", "-t"),
    *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--shutdown-timeout"),
)
"""Options with a value that say where and how processes run. They are ignored: none runs here."""
_FLAGS = ("--standalone", "--run-path", "--no-python", "--virtual-local-rank")
_AUTOMATIC = ("auto", "gpu", "cuda")
_REFUSED = {"--no-python": "only Python programs are run"}


def translated(words: Sequence[str], ours: dict[str, bool], gpus_per_node: int) -> list[str]:
    """Return ``words`` with torchrun's options before the program replaced by prismscale's.

    Args:
        words: a command line without the command's name.
        ours: names of prismscale's options, and whether each takes a value.
        gpus_per_node: the number that ``--nproc-per-node gpu`` stands for.

    Raises:
        UsageError: an option that prismscale cannot follow.
    """
    left, kept = list(words), []
    sizes: dict[str, str] = {}
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            if left and left[0].startswith("-"):
                continue  # No script begins with "-": options follow, as in `-- -m module`.
            left.insert(0, word)
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in ours:
            kept.append(name + equals + value)
            if name == "-m":
                break
            if ours[name] and not equals and left:
                kept.append(left.pop(0))
        elif name == "--module":
            kept.append("-m")
            break
        elif name in _REFUSED:
            raise UsageError(f"{name} of torchrun: {_REFUSED[name]}")
        elif name in _FLAGS:
            continue
        elif name in (*_SIZES, *_PLACES):
            given = value if equals else (left.pop(0) if left else "")
            if name in _SIZES:
                sizes[name] = given
        else:
            kept.append(word)
    if not sizes:
        return [*kept, *left]
    world_size = str(_world_size(sizes, gpus_per_node))
    if _value_of("--world-size", kept) not in ("", world_size):
        raise UsageError(
            f"--world-size is {_value_of('--world-size', kept)}, and torchrun's options make "
            f"{world_size} ranks; give one of them"
        )
    return ["--world-size", world_size, *kept, *left]


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return the last value of an option, or the empty string."""
    found = ""
    for n, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            found = value if equals else "".join(words[n + 1 : n + 2])
    return found


def _world_size(sizes: dict[str, str], gpus_per_node: int) -> int:
    nodes = _number("--nnodes", sizes.get("--nnodes", "1").rpartition(":")[2])
    text = sizes.get("--nproc-per-node", "1")
    each = gpus_per_node if text in _AUTOMATIC else _number("--nproc-per-node", text)
    if each > gpus_per_node or (nodes > 1 and each != gpus_per_node):
        raise UsageError(
            f"--nproc-per-node is {each}, and the cluster has {gpus_per_node} GPUs a node; give "
            "both the same, with a --cluster file of your own if need be"
        )
    return nodes * each


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} {text!r}: give a number")
    return int(text)
