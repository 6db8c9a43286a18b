"""``bench/bridge_release.py``: which release a checkout is, and how its recipes start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(bench_module: Callable[[str], Any]) -> Any:
    """The bench as a module."""
    return bench_module("bridge_release")


def test_a_release_is_its_first_two_numbers(bench: Any, tmp_path: Path) -> None:
    """As Megatron-Bridge states them, one a line."""
    file = tmp_path / "src" / "megatron" / "bridge" / "package_info.py"
    file.parent.mkdir(parents=True)
    file.write_text('MAJOR = 0\nMINOR = 5\nPATCH = 1\nPRE_RELEASE = ""\n')

    assert bench.release_of(tmp_path) == "0.5"


def test_a_folder_that_is_no_checkout_is_named(bench: Any, tmp_path: Path) -> None:
    """Rather than a traceback."""
    with pytest.raises(SystemExit, match=f"{tmp_path} is no checkout"):
        bench.release_of(tmp_path)


def test_a_recipe_starts_with_the_launchers_options(bench: Any, tmp_path: Path) -> None:
    """The program is ours; what follows is the launcher's folder and its options."""
    program, scripts, *options = bench.launch_command(
        tmp_path, family="llama", model="llama3_70b", gpu="h100", gpus=64, precision="fp8_cs"
    )

    assert Path(program).is_file()
    assert scripts == tmp_path / "scripts" / "performance"
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--model_family_name": "llama",
        "--model_recipe_name": "llama3_70b",
        "--gpu": "h100",
        "--num_gpus": 64,
        "--compute_dtype": "fp8_cs",
        "--task": "pretrain",
    }
