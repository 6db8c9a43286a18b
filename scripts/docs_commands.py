"""docs/command-line.md from the command line itself: every command, argument and option."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Iterator
from typing import Any

from prismscale import errors
from prismscale.cli import all_commands


def commands() -> Iterator[tuple[str, Any]]:
    """``(full name, command)`` of every command that does something, groups left out."""
    for name, command in all_commands().items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield f"prismscale {name}", command
        else:
            yield from ((f"prismscale {name} {child}", inner[child]) for child in inner)


def command_list() -> str:
    """One line for each command."""
    rows = ((name, command, _anchor(name)) for name, command in commands())
    lines = (f"| [`{n}`](#{a}) | {_cell(_summary(c))} |" for n, c, a in rows)
    return "\n".join(["| command | |", "|---|---|", *lines])


def _summary(command: Any) -> str:
    return inspect.cleandoc(command.help or "").split("\n\n")[0]


def _anchor(name: str) -> str:
    """How the page's heading for a command is linked to."""
    return name.replace(" ", "-")


def command_reference() -> str:
    """One section for each command."""
    return "\n\n".join(_section(name, command) for name, command in commands())


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-")]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_placeholder, arguments)])
    lines = [f"## `{name}`", "", inspect.cleandoc(command.help or ""), "", f"    {usage}"]
    if arguments:
        lines += ["", "| argument | meaning |", "|---|---|"]
        lines += [f"| `{_placeholder(a)}` | {_cell(a.help)} |" for a in arguments]
    if options:
        lines += ["", "| option | default | meaning |", "|---|---|---|"]
        lines += [f"| {_names(o)} | {_default(o)} | {_meaning(o)} |" for o in options]
    return "\n".join(lines)


def _placeholder(argument: Any) -> str:
    name = argument.name.upper()
    name = f"{name}…" if argument.nargs == -1 else name
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    return " ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.show_default is False or option.default in (None, "", ()):
        return "–"
    if isinstance(option.default, bool):
        if not option.secondary_opts:
            return "–"
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    return f"`{option.default}`"


def _meaning(option: Any) -> str:
    more = " May be repeated." if option.multiple else ""
    return f"{_cell(option.help)}{more}"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def exit_codes() -> str:
    """The table of exit codes, from the exception tree."""
    rows = [(0, "", "The command did what it was asked to do.")]
    for kind in _kinds(errors.PrismscaleError):
        rows.append((kind.exit_code, f"`{kind.__name__}`", _first_line(kind)))
    rows += [(128 + signal.SIGINT, "", "Ctrl-C. Everything that was started has been ended.")]
    rows += [(128 + signal.SIGTERM, "", "SIGTERM. Everything that was started has been ended.")]
    lines = [f"| {code} | {name} | {meaning} |" for code, name, meaning in rows]
    return "\n".join(["| code | error | meaning |", "|---:|---|---|", *lines])


def _kinds(kind: type[errors.PrismscaleError]) -> Iterator[type[errors.PrismscaleError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _kinds(child)


def _first_line(kind: type) -> str:
    line = inspect.cleandoc(kind.__doc__ or "").splitlines()[0]
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", line)
