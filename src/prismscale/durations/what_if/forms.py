"""Parses what-ifs: ``kernel=attention.* x0.5``, ``overlap=mesh_dp off``, and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from prismscale.cluster import Cluster, Link
from prismscale.cost.kernel_changes import PRODUCT_DTYPES, HostFactor, KernelFactor, ProductDtype
from prismscale.errors import UsageError, did_you_mean

MOST_FACTOR = 1e6
LINKS: Mapping[str, str] = {
    "nvlink": "intra_node",
    "intra_node": "intra_node",
    "network": "inter_node",
    "inter_node": "inter_node",
}
"""Accepted names of links, with the field of a cluster that describes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapOff:
    """Communications of a group block the computing stream."""

    group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """A link has ``factor`` times its bandwidth."""

    link: str
    """Field of a cluster: ``intra_node`` or ``inter_node``."""
    factor: float

    def on(self, cluster: Cluster) -> Cluster:
        """Return ``cluster`` with the changed link."""
        if self.link == "intra_node":
            return replace(cluster, intra_node=self._faster(cluster.intra_node))
        return replace(cluster, inter_node=self._faster(cluster.inter_node))

    def _faster(self, link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOn:
    """A group communicates over one link only.

    Its members are on one node (``intra_node``), or each on a node of its own (``inter_node``).
    """

    group: str
    link: str
    """Field of a cluster: ``intra_node`` or ``inter_node``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksShared:
    """Groups that communicate at the same time share links: :mod:`prismscale.sim.shared_links`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeShared:
    """Communications take multiprocessors from what computes beside them:
    :mod:`prismscale.sim.shared_compute`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeOff:
    """Backward passes compute nothing a second time."""


Form = (
    KernelFactor
    | HostFactor
    | ProductDtype
    | OverlapOff
    | LinkSpeed
    | GroupOn
    | LinksShared
    | ComputeShared
    | RecomputeOff
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """One what-if: its text as it was written, and its parsed form."""

    text: str
    form: Form


def parse_what_ifs(texts: Sequence[str]) -> tuple[WhatIf, ...]:
    """Parse several what-ifs, in their order.

    Raises:
        UsageError: one is invalid, one is given twice, or two contradict each other.
    """
    found = tuple(parse_what_if(text) for text in texts)
    if len({w.form for w in found}) < len(found):
        twice = next(w.text for n, w in enumerate(found) if w.form in [f.form for f in found[:n]])
        raise UsageError(f"what-if {twice!r} is given twice; once is enough")
    placed: dict[str, str] = {}
    for what_if in found:
        if isinstance(what_if.form, GroupOn):
            other = placed.setdefault(what_if.form.group, what_if.text)
            if other != what_if.text:
                raise UsageError(
                    f"what-ifs {other!r} and {what_if.text!r} put one group in two places; "
                    "give one of them"
                )
    return found


def parse_what_if(text: str) -> WhatIf:
    """Parse one what-if.

    Raises:
        UsageError: ``text`` has none of the forms; the message lists them.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or key not in _FORMS:
        raise UsageError(
            f"what-if {text!r}: give {', '.join(_EXAMPLES[:-1])} or {_EXAMPLES[-1]}"
            + ("" if key in _FORMS else f"; {did_you_mean(key, _FORMS)}")
        )
    example, read = _FORMS[key]
    form = read(value)
    if form is None:
        raise UsageError(f"what-if {text!r}: give it like {example}")
    return WhatIf(text=" ".join(text.split()), form=form)


def _kernel(value: str) -> Form | None:
    found = _FACTOR.fullmatch(value)
    if found is None:
        return None
    try:
        re.compile(found[1])
    except re.error as error:
        raise UsageError(
            f"what-if 'kernel={value}': {found[1]!r} is no regular expression ({error}); a name "
            "such as mm, or attention.* for all that begins so, is one"
        ) from error
    return KernelFactor(pattern=found[1], factor=_factor(found[2], f"kernel={value}"))


def _host(value: str) -> Form | None:
    found = re.fullmatch(r"[x×]\s*(\S+)", value)
    return None if found is None else HostFactor(factor=_factor(found[1], f"host={value}"))


def _overlap(value: str) -> Form | None:
    found = re.fullmatch(r"(\S.*?)\s+off", value)
    return None if found is None else OverlapOff(group=found[1])


def _link(value: str) -> Form | None:
    found = _FACTOR.fullmatch(value)
    if found is None:
        return None
    return LinkSpeed(link=_link_name(found[1]), factor=_factor(found[2], f"link={value}"))


def _group(value: str) -> Form | None:
    found = re.fullmatch(r"(\S.*?)\s+on\s+(\S+)", value)
    return None if found is None else GroupOn(group=found[1], link=_link_name(found[2]))


def _links(value: str) -> Form | None:
    return LinksShared() if value == "shared" else None


def _compute(value: str) -> Form | None:
    return ComputeShared() if value == "shared" else None


def _recompute(value: str) -> Form | None:
    return RecomputeOff() if value == "off" else None


def _dtype(value: str) -> Form | None:
    if value not in PRODUCT_DTYPES:
        raise UsageError(f"what-if 'dtype={value}': {did_you_mean(value, PRODUCT_DTYPES)}")
    return ProductDtype(name=value)


_FACTOR = re.compile(r"(\S.*?)\s+[x×]\s*(\S+)")
_FORMS: Mapping[str, tuple[str, Callable[[str], Form | None]]] = {
    "kernel": ("'kernel=attention.* x0.5'", _kernel),
    "host": ("'host=x2'", _host),
    "overlap": ("'overlap=mesh_dp off'", _overlap),
    "link": ("'link=nvlink x2'", _link),
    "group": ("'group=mesh_tp on network'", _group),
    "links": ("'links=shared'", _links),
    "compute": ("'compute=shared'", _compute),
    "recompute": ("'recompute=off'", _recompute),
    "dtype": ("'dtype=fp8'", _dtype),
}
_EXAMPLES = tuple(example for example, _ in _FORMS.values())


def _link_name(given: str) -> str:
    if given not in LINKS:
        raise UsageError(f"what-if: link {given!r}; {did_you_mean(given, LINKS)}")
    return LINKS[given]


def _factor(text: str, given: str) -> float:
    try:
        factor = float(text)
    except ValueError as error:
        raise UsageError(
            f"what-if {given!r}: {text!r} is no number; give a factor such as x0.5"
        ) from error
    # NaN compares as false, so it is refused here, too.
    if not 1 / MOST_FACTOR < factor < MOST_FACTOR:
        raise UsageError(
            f"what-if {given!r}: the factor is {text}; allowed: above {1 / MOST_FACTOR:f}, below "
            f"{MOST_FACTOR:,.0f}. What costs next to nothing is x0.001"
        )
    return factor
