"""The folder of a run: whose it is, and what an earlier run left in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prismscale.errors import StorageError, UsageError
from prismscale.files import part_of, remove_parts
from prismscale.runfolder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(root=tmp_path / "a" / "run")


def test_a_folder_is_made_with_its_parents(folder: RunFolder) -> None:
    """Logs have their place at once, results have none yet."""
    with folder.opened(fresh=False):
        assert folder.logs.is_dir()
        assert not folder.results.exists()


def test_captures_are_kept_and_results_are_not(folder: RunFolder) -> None:
    """Nobody takes an earlier run's figures for this one's, nor half a file for a whole one."""
    with folder.opened(fresh=False):
        kept = folder.captures("key") / "rank-0.parquet"
    half = kept.with_name(".rank-1.parquet.12ab.part")
    for path in (kept, half, folder.results, folder.report):
        path.write_text("x")
    with folder.opened(fresh=False):
        assert kept.exists()
        assert not any(p.exists() for p in (half, folder.results, folder.report))


def test_halves_go_when_a_run_is_interrupted(folder: RunFolder) -> None:
    """A process that was ended while it wrote cannot remove its own."""
    half = folder.root / "captures" / ".rank-1.parquet.12ab.part"

    def interrupted() -> None:
        with folder.opened(fresh=False):
            half.parent.mkdir()
            half.write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not half.exists()


def test_whatever_is_written_in_part_is_found_again(tmp_path: Path) -> None:
    """Names of halves and the search for them belong together; whole files stay."""
    whole = tmp_path / "payloads" / "broadcast.r0.s0.n0.g0.bin"
    whole.parent.mkdir()
    for path in (whole, part_of(whole)):
        path.touch()
    remove_parts(tmp_path)
    assert list(whole.parent.iterdir()) == [whole]


def test_fresh_forgets_everything(folder: RunFolder) -> None:
    """But the folder stays ours."""
    with folder.opened(fresh=False):
        kept = folder.captures("key") / "rank-0.parquet"
        kept.write_text("x")
    with folder.opened(fresh=True):
        assert not kept.exists()


def test_fresh_takes_links_and_not_what_they_lead_to(folder: RunFolder, tmp_path: Path) -> None:
    """Captures may lie on a larger disk."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    with folder.opened(fresh=False):
        (folder.root / "captures").symlink_to(elsewhere)
    with folder.opened(fresh=True):
        assert not (folder.root / "captures").is_symlink()
    assert (elsewhere / "kept").exists()


def test_observations_of_one_live_run_are_kept(folder: RunFolder) -> None:
    """Those of the run before go."""
    with folder.opened(fresh=False):
        first = folder.observations("first")
        (first / "live-0.json").write_text(json.dumps({}))
        assert (folder.observations("first") / "live-0.json").exists()
        folder.observations("second")
        assert not first.exists()


def test_two_runs_cannot_share_a_folder(folder: RunFolder) -> None:
    """The second is told, and the folder is free again after the first."""
    with folder.opened(fresh=False), pytest.raises(UsageError, match="in use by another run"):
        folder.opened(fresh=False).__enter__()
    with folder.opened(fresh=False):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Nothing in it is touched."""
    (tmp_path / "thesis.txt").write_text("x")
    with (
        pytest.raises(UsageError, match="not a run's"),
        RunFolder(root=tmp_path).opened(fresh=True),
    ):
        pass
    assert (tmp_path / "thesis.txt").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """A path that cannot be a folder."""
    (tmp_path / "run").write_text("x")
    with pytest.raises(StorageError, match="cannot be used"):
        RunFolder(root=tmp_path / "run").opened(fresh=False).__enter__()
