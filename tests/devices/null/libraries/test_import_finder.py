"""Imports of CUDA binaries are answered where their library's Python code is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prismscale.devices.null.libraries.import_finder import StandInFinder
from prismscale.devices.null.libraries.stand_in import StandIn, from_file, module_of
from prismscale.devices.stand_in_file import StandInFile
from prismscale.errors import UsageError


@pytest.fixture
def finder() -> Iterator[StandInFinder]:
    """One that answers during the test."""
    finder, modules = StandInFinder([]), set(sys.modules)
    finder.begin()
    yield finder
    sys.meta_path.remove(finder)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def _binary(name: str, **named: Any) -> StandIn:
    content = {"scale": lambda x: x}
    return StandIn(
        name=f"library of {name}",
        namespace=name,
        modules={name: lambda: module_of(name, content, library=name)},
        **named,
    )


def test_a_module_is_made_when_it_is_imported(finder: StandInFinder) -> None:
    """Not before, and from then on its stand-in is in use."""
    finder.add([_binary("made_up_cuda"), _binary("never_asked_cuda")])
    assert finder.used == ()
    module = importlib.import_module("made_up_cuda")
    assert module.scale(3) == 3
    assert [stand_in.name for stand_in in finder.used] == ["library of made_up_cuda"]


def test_what_is_not_there_is_named(finder: StandInFinder) -> None:
    """With the way to give it."""
    finder.add([_binary("made_up_cuda")])
    module = importlib.import_module("made_up_cuda")
    with pytest.raises(AttributeError, match=r"--stand-in made_up_cuda=FILE\.py"):
        module.transpose  # noqa: B018


def test_a_missing_library_that_could_be_here_is_explained(finder: StandInFinder) -> None:
    """Its Python code is all that is needed."""
    finder.add([_binary("made_up_cuda", python="made_up")])
    error = ModuleNotFoundError("No module named 'made_up.ops'", name="made_up.ops")
    finder.explain_missing(error)
    assert "its Python code has to be installed" in error.__notes__[0]

    other = ModuleNotFoundError("No module named 'numbers_'", name="numbers_")
    finder.explain_missing(other)
    assert not hasattr(other, "__notes__")


def test_a_library_that_is_not_installed_stays_away(
    finder: StandInFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its binary would be found only where its Python code is."""
    finder.add([_binary("made_up_cuda", python="made_up")])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("made_up_cuda")
    (tmp_path / "made_up.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("made_up_cuda").scale(1) == 1


def test_python_code_that_loads_the_binary_is_executed_within_its_context(
    finder: StandInFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context sees the module before and after."""
    (tmp_path / "made_up.py").write_text("import sys\nloaded = 'made_up_cuda' in sys.modules\n")
    monkeypatch.syspath_prepend(tmp_path)

    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        importlib.import_module("made_up_cuda")
        yield
        vars(module)["mended"] = True

    finder.add([_binary("made_up_cuda", around={"made_up": around})])
    module: Any = importlib.import_module("made_up")
    assert (module.loaded, module.mended) == (True, True)


def test_a_file_of_ones_own_goes_before(finder: StandInFinder, tmp_path: Path) -> None:
    """Also before a stand-in that comes along."""
    (tmp_path / "mine.py").write_text("def scale(x):\n    return 7\n")
    file = StandInFile.parse(f"made_up_cuda={tmp_path / 'mine.py'}")
    finder.add([_binary("made_up_cuda")])
    finder.add([from_file(file)])
    assert importlib.import_module("made_up_cuda").scale(1) == 7
    assert [stand_in.name for stand_in in finder.used] == ["made_up_cuda"]


def test_a_file_is_named_by_its_module(tmp_path: Path) -> None:
    """By its own name, or by the one before the equals sign; both are checked."""
    path = tmp_path / "my_kernels.py"
    path.write_text("")
    assert StandInFile.parse(str(path)).module == "my_kernels"
    assert StandInFile.parse(f"package._C={path}").module == "package._C"
    with pytest.raises(UsageError, match="no Python file"):
        StandInFile.parse("nowhere.py")
    with pytest.raises(UsageError, match="no name of a module"):
        StandInFile.parse(f"my-kernels={path}")


def test_captures_depend_on_what_is_in_the_file(tmp_path: Path) -> None:
    """Another content, another digest."""
    path = tmp_path / "my_kernels.py"
    path.write_text("a = 1\n")
    file = StandInFile.parse(str(path))
    before = file.digest
    path.write_text("a = 2\n")
    assert file.digest != before
