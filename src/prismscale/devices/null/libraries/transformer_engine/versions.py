"""Version of Transformer Engine's installed Python code, and versions that the stand-in knows."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "transformer-engine"
EXTENSION = "transformer_engine_torch"
_FIRST, _LAST = (2, 2), (2, 20)


@cache
def installed() -> str:
    """Return the version; empty if the package is not installed or its version cannot be found."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def is_since(major: int, minor: int) -> bool:
    """Return whether the extension is that of ``major.minor`` or newer.

    If nothing is installed, it is that of the newest known version.
    """
    return (_numbers(installed()) if installed() else _LAST) >= (major, minor)


def check_version(given: str) -> None:
    """Check the version, because functions take other arguments in other versions.

    Raises:
        NotImplementedError: the stand-in was not written for ``given``. It is not an ImportError,
            because after an ImportError programs go on with other layers.
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
