"""Further work of the programs that measured kernels: ``harness.toml`` beside this module.

These constants belong to the measuring programs, and are fitted with the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from prismscale.typed_files import decode, parse

_QUANTISED_BYTES = 3
"""Bytes moved for each quantised activation: two are read, one is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """Time that a measuring program needed besides the product."""

    overhead_ns: float = 0.0
    quantise_share: float = 0.0
    """Share of the memory bandwidth that quantising the activations reaches; 0: none quantised."""
    floor_ns: float = 0.0
    """Shortest time of a row, limited by the thread that issues the kernels."""

    def measured_ns(
        self, product_ns: NDArray[np.float64], extents: NDArray[np.float64], bandwidth: float
    ) -> NDArray[np.float64]:
        """Return the times that the program reads if the products alone take ``product_ns``."""
        time_ns = product_ns + self.overhead_ns
        if self.quantise_share:
            n_bytes = _QUANTISED_BYTES * extents[0] * extents[1] * extents[3]
            time_ns = time_ns + 1e9 * n_bytes / (self.quantise_share * bandwidth)
        return np.maximum(time_ns, self.floor_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProgram:
    """Time that a measuring program needed besides attention."""

    overhead_ns: float = 0.0
    kv_passes: float = 0.0
    """How many more times keys and values crossed the memory bus than attention alone needs."""
    slowdown: float = 1.0
    """Factor on the kernel's time, for reading keys through a table of pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harnesses:
    """``harness.toml``: the measuring programs by GPU, kind and framework."""

    programs: Mapping[str, Harness]
    attention: Mapping[str, AttentionProgram] = field(default_factory=dict)
    experts: Mapping[str, Harness] = field(default_factory=dict)
    """Programs of expert layers, by GPU and library: sorting tokens, and starting kernels."""

    @classmethod
    def load(cls) -> Harnesses:
        """Load the file of this package."""
        file = resources.files("prismscale.validation.kernels").joinpath("harness.toml")
        return decode(cls, parse(file.read_text(encoding="utf-8"), "harnesses"), "harnesses")
