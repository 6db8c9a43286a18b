"""What commands that end with a verdict share: how it is asked for, and how it is told."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from prismscale.analysis.answers import Answers
from prismscale.analysis.assertions import Assertion
from prismscale.analysis.wanted import Price, Wanted
from prismscale.files import write_text

PriceOption = Annotated[
    str,
    typer.Option(
        "--price", help="Of a GPU for an hour, for example 2.5/h or 2.2EUR/h.", show_default=False
    ),
]
ForSteps = Annotated[int, typer.Option("--for-steps", help="Steps to tell GPU-hours for.")]
TokensPerStep = Annotated[
    int,
    typer.Option(
        "--tokens-per-step", help="Of the whole job.", show_default="found on a null device"
    ),
]
Asserted = Annotated[
    list[str] | None,
    typer.Option(
        "--assert",
        help="Fail unless it holds, for CI: reserved<76GiB, hidden(dp)>0.9, step<1.3s; repeatable.",
        show_default=False,
    ),
]
JsonPath = Annotated[
    str,
    typer.Option(
        "--json",
        help="Write results and answers to a file; -: to standard output, alone.",
        show_default=False,
    ),
]
MarkdownPath = Annotated[
    str,
    typer.Option(
        "--markdown",
        help="Write the answers for a pull request to a file; -: to standard output, alone.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """What is asked about a run, and where the answers go."""

    asked: Wanted
    asserted: tuple[Assertion, ...]
    json: str = ""
    markdown: str = ""

    @staticmethod
    def of(
        price: str,
        for_steps: int,
        tokens_per_step: int,
        asserted: list[str] | None,
        json_path: str,
        markdown: str,
    ) -> Verdicts:
        """What the options ask for.

        Raises:
            UsageError: one of them cannot be.
        """
        return Verdicts(
            asked=Wanted(
                price=Price.parse(price) if price else None,
                for_steps=for_steps,
                tokens_per_step=tokens_per_step,
            ),
            asserted=tuple(Assertion.parse(text) for text in asserted or ()),
            json=json_path,
            markdown=markdown,
        )

    @property
    def owns_output(self) -> bool:
        """Whether standard output is for a program: people read standard error then."""
        return is_alone(self.json, self.markdown)


def is_alone(*paths: str) -> bool:
    """Whether one of the files to write is standard output, which nothing else may go to then."""
    return "-" in paths


def answers_json(found: Answers) -> dict[str, Any]:
    """Plain data, with what follows from the fields of a fit."""
    data = asdict(found)
    return data | {"fit": None if found.fit is None else found.fit.to_json()}


def emit(text: str, path: str) -> None:
    """Write to a file, or to standard output for ``-``; nothing for an empty path.

    Raises:
        StorageError: it cannot be written.
    """
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif path:
        write_text(Path(path), text)


def as_json(data: dict[str, Any]) -> str:
    """The text of a file."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
