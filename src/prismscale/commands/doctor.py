"""``prismscale doctor``: what works on this machine, and how to mend what does not."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from prismscale.installation import Finding, State, examine
from prismscale.progress import terminal

_STYLE = {State.WORKS: "green", State.ABSENT: "yellow", State.BROKEN: "red"}


def doctor() -> None:
    """Say what is installed, what works, and the command that mends the rest."""
    console = terminal()
    found: list[Finding] = []
    # The null device may have to be compiled, which takes longest.
    with terminal(stderr=True).status("trying the null device (compiled once, 15 to 60 seconds)"):
        found += examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in found:
        state = Text(finding.state.value, style=_STYLE[finding.state])
        mend = f"\n→ {finding.mend}" if finding.mend else ""
        table.add_row(finding.part, state, f"{finding.detail}{mend}")
    console.print(table)
    if any(finding.state is State.BROKEN for finding in found):
        raise typer.Exit(1)
