"""Reads the rules in a user's file; see :mod:`.rule_file`."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from prismscale.errors import FormatError, PrismscaleError, UsageError, did_you_mean
from prismscale.payload.rules.rule import ATTRIBUTE, Match, Rule
from prismscale.payload.rules.shipped import SHIPPED
from prismscale.payload.rules.values import OWN
from prismscale.typed_files import decode, read

_MATCH_KEYS = tuple(f.name for f in fields(Match))


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlRule:
    """One ``[[rule]]`` of a TOML file, as written there."""

    name: str = ""
    op: tuple[str, ...] = ()
    group: str = ""
    site: str = ""
    dtype: tuple[str, ...] = ()
    numel: int = 0
    max_numel: int = 0
    reduce: str = ""
    use: str = ""
    """Name of a shipped rule."""


def rules_in(path: Path) -> Iterator[Rule]:
    """Return the rules of a file, in its order. A Python file is executed.

    Raises:
        UsageError: the file fails.
        FormatError: the file is TOML that describes no rules.
    """
    return _from_toml(path) if path.suffix == ".toml" else _from_python(path)


def _from_python(path: Path) -> Iterator[Rule]:
    try:
        names = runpy.run_path(str(path), run_name="prismscale_rules")
    except PrismscaleError:
        raise
    except BaseException as error:
        raise UsageError(f"rules file {path.name}: {type(error).__name__}: {error}") from error
    rules = [getattr(value, ATTRIBUTE, None) for value in names.values()]
    # One function may have two names.
    yield from dict.fromkeys(rule for rule in rules if isinstance(rule, Rule))


def _from_toml(path: Path) -> Iterator[Rule]:
    table = read(path, "rules")
    unknown = [key for key in table if key != "rule"]
    if unknown:
        raise FormatError(f"{path}: unknown key '{unknown[0]}'; each rule is a table [[rule]]")
    entries = table.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FormatError(f"{path}: 'rule' is no list of tables; begin each rule with [[rule]]")
    for number, entry in enumerate(entries, 1):
        yield _rule(entry, number, path)


def _rule(entry: Mapping[str, Any], number: int, path: Path) -> Rule:
    origin = f"{path}: rule {number}"
    shipped = SHIPPED.get(str(entry.get("use", "")))
    if "use" in entry and shipped is None:
        hint = did_you_mean(str(entry["use"]), SHIPPED)
        raise FormatError(f"{origin}: use = {entry['use']!r}; {hint}")
    defaults = {"value": None} if shipped is None else shipped.parameters
    own = {f.name for f in fields(TomlRule)}
    given = {key: value for key, value in entry.items() if key in defaults}
    listed = {key: _listed(key, entry[key]) for key in entry if key not in given}
    for key in listed:
        if key not in own:
            hint = did_you_mean(key, own | {*defaults})
            raise FormatError(f"{origin}: unknown key '{key}'; {hint}")
    written = decode(TomlRule, listed, origin)
    parameters = {**defaults, **given}
    for key, value in parameters.items():
        if value is None:
            raise FormatError(f"{origin}: key '{key}' is missing")
        _check_value(key, value, origin)
    base = Match() if shipped is None else shipped.match
    changed = {k: getattr(written, k) for k in _MATCH_KEYS if k in listed}
    try:
        match = replace(base, **changed)
        contribute = _plain(parameters) if shipped is None else shipped.contribute(parameters)
    except UsageError as error:
        raise FormatError(f"{origin}: {error}") from error
    return Rule(
        name=written.name or written.use or f"rule {number}",
        where=path.name,
        match=match,
        contribute=contribute,
        is_recorded=shipped is not None and shipped.is_recorded,
        is_per_peer=False,
    )


def _plain(parameters: Mapping[str, Any]) -> Any:
    value = parameters["value"]
    return lambda told, peer: value


def _listed(key: str, value: Any) -> Any:
    """Return a list for ``op`` and ``dtype``, which may be one value or several."""
    return [value] if key in ("op", "dtype") and isinstance(value, str) else value


def _check_value(key: str, value: Any, origin: str) -> None:
    is_numbers = isinstance(value, list) and all(isinstance(x, bool | int | float) for x in value)
    if not (isinstance(value, bool | int | float) or value == OWN or (is_numbers and value)):
        raise FormatError(
            f"{origin}: {key} = {value!r}; allowed: a number, a list of numbers, or {OWN!r}"
        )
