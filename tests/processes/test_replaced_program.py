"""Python programs that take their process's place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prismscale.processes.replaced_program import split_options

REPLACED = """
import os, sys
from prismscale.processes.replaced_program import followed_when_replaced

def anew(words):
    print("asked for", words, flush=True)
    return None if words[0] == "-c" else ["-c", "import os; print('anew', os.environ.get('TOLD'))"]

with followed_when_replaced(anew):
    {call}
"""


def replaced(call: str) -> list[str]:
    """Lines that a process prints which ``call`` replaces."""
    text = REPLACED.format(call=call)
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("os.execv(sys.executable, [sys.executable, 'train.py', '7'])", None),
        ("os.execl(sys.executable, sys.executable, 'train.py', '7')", None),
        ("os.execve(sys.executable, ['python', 'train.py', '7'], {'TOLD': 'x'})", "x"),
        ("os.execvpe(sys.executable, ['python', 'train.py', '7'], {'TOLD': 'x'})", "x"),
    ],
)
def test_each_way_to_begin_python_anew_is_followed(call: str, told: str | None) -> None:
    """With the environment that the program gives."""
    assert replaced(call) == ["asked for ['train.py', '7']", f"anew {told}"]


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("os.execv('/bin/echo', ['echo', '4'])", ["4"]),
        ("os.execvp('echo', ['echo', '4'])", ["4"]),
        (
            "os.execv(sys.executable, ['python', '-c', 'print(4)'])",
            ["asked for ['-c', 'print(4)']", "4"],
        ),
    ],
)
def test_what_runs_no_program_takes_the_place_as_it_is(call: str, lines: list[str]) -> None:
    """Another executable, or words that name no program."""
    assert replaced(call) == lines


@pytest.mark.parametrize(
    ("words", "n_options"),
    [
        (["train.py", "-m"], 0),
        (["-u", "train.py"], 1),
        (["-X", "importtime", "-W", "error", "-u", "-m", "train"], 5),
        (["-c", "1"], 0),
        (["-"], 0),
        (["-u"], 1),
        ([], 0),
    ],
)
def test_options_of_an_interpreter_end_where_its_program_begins(
    words: list[str], n_options: int
) -> None:
    """An option may have a value of its own."""
    assert split_options(words) == (words[:n_options], words[n_options:])
