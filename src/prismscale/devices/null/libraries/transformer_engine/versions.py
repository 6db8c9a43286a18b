"""Which Transformer Engine's Python code is installed, and whether the stand-in knows it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "transformer-engine"
EXTENSION = "transformer_engine_torch"
_FIRST, _LAST = (2, 2), (2, 20)


@cache
def installed() -> str:
    """The version; empty where it is not installed, or cannot be told."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def is_since(major: int, minor: int) -> bool:
    """Whether the extension is that of ``major.minor`` or newer: the newest that is known, where
    nothing is installed."""
    return (_numbers(installed()) if installed() else _LAST) >= (major, minor)


def check_version(given: str) -> None:
    """Functions take other arguments in other versions.

    Raises:
        NotImplementedError: the stand-in was not written for ``given``. Not an ImportError, which
            programs take as leave to go on with other layers.
    """
    if not _FIRST <= _numbers(given) <= _LAST:
        raise NotImplementedError(
            "prismscale's stand-in for Transformer Engine knows versions "
            f"{_words(_FIRST)} to {_words(_LAST)}; installed is {given}: pip install --no-deps "
            f"transformer-engine=={_words(_LAST)}, or give a stand-in of your own: "
            f"--stand-in {EXTENSION}=FILE.py"
        )


def _numbers(given: str) -> tuple[int, int]:
    major, minor = (int(part) for part in given.split(".")[:2])
    return major, minor


def _words(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
