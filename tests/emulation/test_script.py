"""The user's program, run as the interpreter would run it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prismscale.emulation.call_site import call_site
from prismscale.emulation.script import Script, StopProgram
from prismscale.errors import UsageError
from prismscale.processes.failure import FAILED, SPEECHLESS, load_failure, save_failure
from support.disks import file_size_limit


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a program changes is put back."""
    monkeypatch.setattr(sys, "argv", ["ours"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("helper", "package", "package.train"):
        sys.modules.pop(name, None)


def program(text: str, name: str = "train.py") -> str:
    """A script in the working folder."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    return name


def test_a_script_sees_its_arguments_its_folder_and_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As with ``python sub/train.py --lr 1``."""
    program("VALUE = 5\n", "sub/helper.py")
    name = program("import sys, helper\nprint(__name__, sys.argv, helper.VALUE)\n", "sub/train.py")
    Script(target=name, args=("--lr", "1")).run()
    assert capsys.readouterr().out == "__main__ ['sub/train.py', '--lr', '1'] 5\n"


def test_a_module_runs_as_with_dash_m(capsys: pytest.CaptureFixture[str]) -> None:
    """From the working folder, with its package."""
    program("", "package/__init__.py")
    program("import sys\nprint(__name__, __package__, sys.argv[1:])\n", "package/train.py")
    Script(target="package.train", args=("7",), is_module=True).run()
    assert capsys.readouterr().out == "__main__ package ['7']\n"


@pytest.mark.parametrize("text", ["raise SystemExit", "import sys; sys.exit(0)", "1"])
def test_a_program_may_end_itself(text: str) -> None:
    """Leaving with 0 is the end, not a failure."""
    Script(target=program(text)).run()  # raises otherwise


def test_a_programs_own_exit_code_is_passed_up() -> None:
    """It gave up."""
    with pytest.raises(SystemExit, match="3"):
        Script(target=program("raise SystemExit(3)")).run()


def test_stopping_a_program_runs_its_finally_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """But not its ``except Exception``."""
    text = (
        "from prismscale.emulation.script import StopProgram\n"
        "try:\n    raise StopProgram\nexcept Exception:\n    print('swallowed')\n"
        "finally:\n    print('cleaned up')\n"
    )
    assert not issubclass(StopProgram, Exception)
    Script(target=program(text)).run()
    assert capsys.readouterr().out == "cleaned up\n"


def test_a_script_that_is_not_there_is_refused() -> None:
    """With where it was looked for."""
    with pytest.raises(UsageError, match=r"'gone\.py' is not a file"):
        Script(target="gone.py")


def test_a_programs_own_code_is_searched_for_words() -> None:
    """That beside it and in its packages, and no other's."""
    script = Script(target=program("import helper"))
    program("model = torch.compile(model)", "package/__init__.py")
    assert script.mentions(["nowhere", "torch.compile("])
    assert not script.mentions(["def compile"])


def test_a_call_site_is_the_users_own_line() -> None:
    """Relative to the working folder."""
    name = program("def call(f):\n    return f()\n\nresult = call(site)\n", "sub/lib.py")
    namespace = {"site": call_site}
    exec(compile(Path(name).read_text(), str(Path(name).resolve()), "exec"), namespace)
    assert namespace["result"] == "sub/lib.py:2"


def test_a_failure_is_told_from_the_users_first_frame_on(tmp_path: Path) -> None:
    """How we started the program is noise."""
    name = program("def load():\n    raise KeyError('tokens')\nload()\n")
    with pytest.raises(KeyError) as caught:
        Script(target=name).run()
    below = caught.tb.tb_next  # the test's own frame is not the user's
    assert save_failure(tmp_path / "error.json", 4, caught.value.with_traceback(below)) == FAILED
    found = load_failure(tmp_path / "error.json")
    assert found is not None
    assert (found["rank"], found["summary"], found["ours"]) == (4, "KeyError: 'tokens'", False)
    assert found["traceback"].count("File ") == 2


def test_a_timeout_of_the_program_names_what_it_may_wait_for(tmp_path: Path) -> None:
    """Other ranks' files, which are not there when it looks."""
    save_failure(tmp_path / "error.json", 7, TimeoutError("no checkpoint folder"), echo=False)
    found = load_failure(tmp_path / "error.json")
    assert found is not None
    assert found["summary"].startswith("TimeoutError: no checkpoint folder (other ranks run at")


def test_a_failure_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """On a disk that has room for some of it."""
    with file_size_limit(100):
        assert save_failure(tmp_path / "error.json", 4, ValueError("x" * 1000)) == SPEECHLESS
    assert list(tmp_path.iterdir()) == []


def test_a_failure_that_cannot_be_written_has_a_code_of_its_own(tmp_path: Path) -> None:
    """The parent then knows why there is no file."""
    assert save_failure(tmp_path / "gone" / "error.json", 4, ValueError()) == SPEECHLESS
    assert load_failure(tmp_path / "gone" / "error.json") is None


@pytest.mark.parametrize(
    ("words", "target", "is_module"),
    [
        (["train.py", "--lr", "1"], "train.py", False),
        (["-m", "package.train", "--lr", "1"], "package.train", True),
    ],
)
def test_a_program_is_read_from_an_interpreters_words(
    words: list[str], target: str, is_module: bool
) -> None:
    """A file or a module, and its arguments."""
    program("", "train.py")
    found = Script.of_words(words)
    assert found == Script(target=target, args=("--lr", "1"), is_module=is_module)


@pytest.mark.parametrize("words", [[], ["-c", "1"], ["-"], ["-m"]])
def test_other_words_name_no_program(words: list[str]) -> None:
    """Text on the command line, standard input, nothing."""
    assert Script.of_words(words) is None
