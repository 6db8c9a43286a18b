"""Named rules for common communications of training programs.

A job uses the rules that its rules file names, and narrows each to its own communications
(``group``, ``site``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from prismscale.errors import UsageError
from prismscale.payload.rules.rule import Communication, Contribute, Match
from prismscale.payload.rules.values import OWN

_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_FLAGS = 8
_SEED = 0x70CE
_LARGEST_VOCABULARY = 2**31 - 1
"""Ids have at least 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedRule:
    """A ready-made rule, for which the user writes no Python."""

    what: str
    match: Match
    contribute: Callable[[Mapping[str, Any]], Contribute]
    """Makes the rule's function from its parameters."""
    parameters: Mapping[str, Any]
    """Default value by parameter name; None: the parameter must be given."""
    is_recorded: bool = False


def _value(parameters: Mapping[str, Any]) -> Contribute:
    value = parameters["value"]
    return lambda told, peer: value


def _token_ids(parameters: Mapping[str, Any]) -> Contribute:
    """Contribute ids below the vocabulary's size.

    They are the same on all ranks of a group, and differ from call to call.
    """
    vocab = parameters["vocab"]
    if type(vocab) is not int or not 1 <= vocab <= _LARGEST_VOCABULARY:
        raise UsageError(
            f"vocab is {vocab!r}; give the size of the vocabulary, a whole number from 1 to "
            f"{_LARGEST_VOCABULARY:,}"
        )

    def ids(told: Communication, peer: int) -> list[torch.Tensor]:
        generator = torch.Generator("cpu").manual_seed(_SEED + 1009 * told.number + peer)
        return [
            # On the host, whatever the program's default device is.
            torch.randint(
                vocab, tuple(t.shape), generator=generator, dtype=torch.int64, device="cpu"
            )
            for t in told.outputs
        ]

    return ids


SHIPPED: Mapping[str, ShippedRule] = {
    "data-loader-status": ShippedRule(
        what="flags by which the rank that loads data says that there is some",
        match=Match(op=("broadcast", "scatter", "recv"), dtype=_INTEGERS, max_numel=_FLAGS),
        contribute=_value,
        parameters={"value": 1},
    ),
    "token-ids": ShippedRule(
        what="tokens and labels: ids inside the vocabulary",
        match=Match(op=("broadcast", "scatter", "recv"), dtype=("int32", "int64")),
        contribute=_token_ids,
        parameters={"vocab": None},
    ),
    "gradient-norm": ShippedRule(
        what="a norm that is summed over ranks: of a peer's gradients what this rank's are",
        match=Match(op=("all_reduce",), dtype=_FLOATS, numel=1, reduce="sum"),
        contribute=_value,
        parameters={"value": OWN},
    ),
    "found-inf": ShippedRule(
        what="the flag that keeps an optimizer from a step and lowers the loss scale: nobody found "
        "an infinity",
        match=Match(op=("all_reduce",), numel=1, reduce="max"),
        contribute=_value,
        parameters={"value": 0},
    ),
    "moe-gating": ShippedRule(
        what="tokens by expert, before they are dispatched: peers have none",
        match=Match(op=("all_gather", "all_to_all"), dtype=(*_INTEGERS, *_FLOATS)),
        contribute=_value,
        parameters={"value": 0},
    ),
    "recorded-objects": ShippedRule(
        what="objects that a root sends: those that it sent when it was captured",
        match=Match(op=("broadcast_object_list", "scatter_object_list")),
        contribute=lambda parameters: lambda told, peer: None,
        parameters={},
        is_recorded=True,
    ),
}
