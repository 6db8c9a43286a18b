"""Time of a GPU kernel from its signature, without the GPU.

The null device asks a :class:`KernelModel` once for each distinct call. The model takes the time
from a profile of rooflines and constants (:class:`ModelledKernels`), from measurements on a GPU
(:mod:`prismscale.cost.kernel_measured`), or returns one constant (:class:`ConstantKernels`).

``torch.compile``: each kernel that inductor generates arrives as one call that states its bytes.
Where compiled regions run eagerly, their pointwise operators arrive one by one. With ``fused=True``
each of these operators costs its share of one pass over memory by the fused kernel. This is an
approximation: which operators inductor would fuse is not reconstructed, and the share is that of a
Llama block (``bench/fusion.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from prismscale.cost.exchange.exchange_law import exchange_ns
from prismscale.cost.kernel_attention import attention_ns
from prismscale.cost.kernel_gemm import TRITON, gemm_call_ns, operand_dtype, own_roofline
from prismscale.cost.kernel_kinds import (
    CALLS_OF_THE_HOST,
    FILL_OF_NEW_MEMORY,
    GENERATED,
    HOST_ONLY_KINDS,
    PRODUCT_KINDS,
    kind_of,
)
from prismscale.cost.kernel_memory import memory_call_ns, peer_ns, transfer_ns
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import KernelCall, parse_signature

FUSED_KINDS = (
    "pointwise",
    "broadcast",
    "reduction",
    "norm",
    "norm_backward",
    "softmax",
    "copy",
    "strided_copy",
    "fill",
)
_FUSED_SHARE = 0.22
"""Memory traffic of inductor's kernels relative to that of eager operators: bench/fusion.py."""
_NEVER_FUSED = ("_chunk_cat", "split_with_sizes_copy")
"""FSDP's copies around communications, which run in hooks outside of compiled regions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCost:
    """Cost of one call, with the source of the figures and their error."""

    device_ns: int
    """Time on the call's stream; 0 for calls that launch nothing."""
    host_ns: int
    """Time of the thread that issues the call."""
    source: str
    """``modelled``, ``scaled`` (by a model fitted on another GPU), ``measured`` or ``default``."""
    error: float | None
    """Relative error (p90) of calls of this kind on held-out measurements; None if not known."""
    kind: str
    """Kind of kernel; see :mod:`prismscale.cost.kernel_kinds`."""


class KernelModel(Protocol):
    """Gives the cost of calls."""

    def cost(self, signature: str) -> KernelCost:
        """Return the cost of the call that ``signature`` describes.

        Raises:
            FormatError: ``signature`` is not a kernel signature.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantKernels:
    """Null implementation: every call costs the same, with source ``default`` and no error."""

    device_ns: int = 5_000
    host_ns: int = 5_000

    def cost(self, signature: str) -> KernelCost:
        """Return the constant cost, whatever the call."""
        return KernelCost(
            device_ns=self.device_ns,
            host_ns=self.host_ns,
            source="default",
            error=None,
            kind=kind_of(parse_signature(signature)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledKernels:
    """Computes costs from a GPU's kernel profile."""

    profile: KernelProfile
    fused: bool = False
    """Whether the pointwise work of compiled regions counts as one pass; see the module."""

    def cost(self, signature: str) -> KernelCost:
        """Return the modelled cost.

        An operator in no table costs its bytes, with source ``default``.
        """
        return self.cost_of_call(parse_signature(signature))

    def cost_of_call(self, call: KernelCall) -> KernelCost:
        """Return :meth:`cost` of a signature that is already parsed."""
        kind = kind_of(call)
        device_ns, launches = _device_cost(self.profile, call, kind)
        host = self.profile.host
        host_ns = host.op_ns + host.launch_ns * (launches - 1) if launches else host.view_ns
        if kind in CALLS_OF_THE_HOST:
            host_ns = host.op_ns  # a compiled graph's kernels are launches within it
        elif _is_bare_launch(call, kind):
            host_ns = host.launch_ns
        own = not self.profile.scaled_from or (
            kind == "gemm" and operand_dtype(call) in self.profile.own_products
        )
        known = "modelled" if own else "scaled"
        cost = KernelCost(
            device_ns=round(device_ns),
            host_ns=round(host_ns),
            source=known if _has_rule(self.profile, call, kind) else "default",
            error=self.profile.errors.get(TRITON if call.namespace == TRITON else kind),
            kind=kind,
        )
        # A library's kernel is already fused: Apex's norms, and the kernels of inductor.
        is_apart = call.is_library or call.base in _NEVER_FUSED
        if self.fused and kind in FUSED_KINDS and not is_apart:
            return _share_of_a_pass(cost)
        return cost


def load_kernel_model(gpu: str, *, fused: bool = False) -> ModelledKernels:
    """Load the kernel model of ``gpu``, for example ``h100-sxm``.

    Raises:
        UsageError: there is no such GPU; the message lists the known ones.
    """
    return ModelledKernels(profile=KernelProfile.load(gpu), fused=fused)


def _is_bare_launch(call: KernelCall, kind: str) -> bool:
    """Whether the call is a launch that has no operator of its own around it."""
    is_fill = call.base == FILL_OF_NEW_MEMORY
    return is_fill or kind == "graph_launch" or call.base.startswith(GENERATED)


def _has_rule(profile: KernelProfile, call: KernelCall, kind: str) -> bool:
    """Whether the profile has a rule for the kind, and for the element type where it matters."""
    if kind in ("gemm", "convolution", "attention", "attention_backward"):
        return len(call.inputs) < 2 or own_roofline(profile, operand_dtype(call)) is not None
    return kind != "unknown"


def _device_cost(profile: KernelProfile, call: KernelCall, kind: str) -> tuple[float, int]:
    """Return the time on the device in ns, and the number of kernels launched."""
    if kind in HOST_ONLY_KINDS:
        return 0.0, 0
    if kind == "exchange":
        return exchange_ns(call), 1
    if kind == "transfer":
        return transfer_ns(profile, call), 1
    if kind == "peer":
        return peer_ns(profile, call), 1
    if kind in PRODUCT_KINDS:
        return gemm_call_ns(profile, call), 1
    if kind in ("attention", "attention_backward"):
        return attention_ns(profile, call, kind), 1 if kind == "attention" else 3
    return memory_call_ns(profile, call, kind)


def _share_of_a_pass(cost: KernelCost) -> KernelCost:
    return replace(
        cost,
        device_ns=round(cost.device_ns * _FUSED_SHARE),
        host_ns=round(cost.host_ns * _FUSED_SHARE),
    )
