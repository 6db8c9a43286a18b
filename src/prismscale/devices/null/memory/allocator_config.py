"""Settings of the CUDA caching allocator, read from PYTORCH_ALLOC_CONF as torch reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prismscale.errors import UsageError, did_you_mean

MIB = 1 << 20

# Settings of torch that do not affect which bytes are held. They are accepted and not modelled.
_NEUTRAL_KEYS = (
    "backend",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
_KEYS = (
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorConfig:
    """The settings that PYTORCH_ALLOC_CONF can give; the defaults are torch's.

    0 means no limit in ``max_split_bytes`` and in ``memory_fraction``. ``roundup_power2_divisions``
    holds one number for each power of two from 1 MiB to 32 GiB (16 in all), or nothing.
    """

    max_split_bytes: int = 0
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 0.0
    expandable_segments: bool = False
    graph_capture_record_stream_reuse: bool = False
    roundup_power2_divisions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_split_bytes and self.max_split_bytes <= self.large_segment_bytes:
            raise UsageError(
                f"max_split_size_mb is {self.max_split_bytes // MIB}; torch demands more than "
                f"{self.large_segment_bytes // MIB}"
            )
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise UsageError(
                f"garbage_collection_threshold is {self.garbage_collection_threshold}; allowed: "
                "from 0 up to, not including, 1"
            )
        if len(self.roundup_power2_divisions) not in (0, 16):
            raise UsageError("roundup_power2_divisions takes 16 numbers, 1 MiB to 32 GiB, or none")


def config_from_environment() -> AllocatorConfig:
    """Return the settings that the environment gives now."""
    return parse_config(text_from_environment())


def text_from_environment() -> str:
    """Return PYTORCH_CUDA_ALLOC_CONF, or else PYTORCH_ALLOC_CONF.

    The older name takes precedence in torch, too.
    """
    found = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return os.environ.get("PYTORCH_ALLOC_CONF", "") if found is None else found


def parse_config(text: str) -> AllocatorConfig:
    """Parse ``key:value,key:value``; raises UsageError for a setting that torch does not have."""
    values: dict[str, str] = {}
    # Commas separate settings, except inside the brackets of roundup_power2_divisions.
    for item in re.split(r",(?![^\[]*\])", text.replace(" ", "")):
        if not item:
            continue
        key, _, value = item.partition(":")
        if key not in _KEYS and key not in _NEUTRAL_KEYS:
            raise UsageError(
                f"PYTORCH_ALLOC_CONF has no setting {key!r}; {did_you_mean(key, _KEYS)}"
            )
        values[key] = value
    if values.get("backend", "native") != "native":
        raise UsageError(
            f"PYTORCH_ALLOC_CONF asks for backend {values['backend']}; only the native caching "
            "allocator is modelled, remove the setting"
        )

    def number(key: str, default: float) -> float:
        try:
            return float(values[key]) if key in values else default
        except ValueError:
            raise UsageError(
                f"PYTORCH_ALLOC_CONF: {key} takes a number, not {values[key]!r}"
            ) from None

    return AllocatorConfig(
        max_split_bytes=int(number("max_split_size_mb", 0) * MIB),
        max_non_split_rounding_bytes=int(number("max_non_split_rounding_mb", 20) * MIB),
        large_segment_bytes=int(number("large_segment_size_mb", 20) * MIB),
        garbage_collection_threshold=number("garbage_collection_threshold", 0.0),
        memory_fraction=number("per_process_memory_fraction", 0.0),
        expandable_segments=_is_set(values, "expandable_segments"),
        graph_capture_record_stream_reuse=_is_set(values, "graph_capture_record_stream_reuse"),
        roundup_power2_divisions=_divisions(values.get("roundup_power2_divisions", "")),
    )


def _is_set(values: Mapping[str, str], key: str) -> bool:
    return values.get(key, "False") in ("True", "true", "1")


def _divisions(value: str) -> tuple[int, ...]:
    """Parse divisions: ``4`` for all sizes, or ``[256:1,512:2,>:8]`` by size in MiB.

    An entry applies to sizes after the one of the entry before, up to its own.
    """
    if not value:
        return ()
    if not value.startswith("["):
        return (int(value),) * 16
    divisions = [1] * 16
    filled = 0
    for entry in value.strip("[]").split(","):
        size, _, count = entry.partition(":")
        upto = 16 if size == ">" else min(int(size).bit_length(), 16)
        for slot in range(filled, upto):
            divisions[slot] = int(count)
        filled = max(filled, upto)
    return tuple(divisions)
