"""Which pickled objects are unpickled."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from prismscale.errors import UsageError
from prismscale.payload.object_marks import ObjectMarks, marked_objects, user_key

PICKLED = pickle.dumps({"rank": 3})
EXECUTED: list[int] = []


class Dangerous:
    """Runs something while it is unpickled."""

    def __reduce__(self) -> object:
        return EXECUTED.append, (1,)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's own cache, with no key yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "prismscale"
    EXECUTED.clear()


def received(data: bytes) -> tuple[torch.Tensor, int]:
    """As an object collective has it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data)


def test_what_a_rank_has_pickled_another_may_unpickle(tmp_path: Path) -> None:
    """Also where zeros were put behind it."""
    writer, reader = (ObjectMarks(tmp_path / "marks", rank) for rank in (0, 1))
    to_object = distributed_c10d._tensor_to_object
    with marked_objects(writer):
        tensor, _ = distributed_c10d._object_to_tensor({"rank": 3}, "cpu", None)
    # As torch does, where another rank's object is longer.
    tensor.resize_(tensor.numel() + 1)
    with marked_objects(reader):
        padded = torch.cat([tensor[:-1], torch.zeros(100, dtype=torch.uint8)])
        found = distributed_c10d._tensor_to_object(padded, padded.numel(), None)
    assert found == {"rank": 3}
    assert distributed_c10d._tensor_to_object is to_object


def test_what_nobody_has_pickled_is_not_unpickled(tmp_path: Path) -> None:
    """Nothing of it is executed, and the error says what to do."""
    refused = pytest.raises(UsageError, match=r"--fresh, or with --trust-objects")
    with marked_objects(ObjectMarks(tmp_path / "marks", 0)), refused:
        distributed_c10d._tensor_to_object(*received(pickle.dumps(Dangerous())), None)
    assert EXECUTED == []


def test_a_changed_byte_is_refused(tmp_path: Path) -> None:
    """Whatever it is."""
    marks = ObjectMarks(tmp_path, 0)
    marks.add(PICKLED)
    marks.refuse_unknown(PICKLED)
    for i in range(len(PICKLED)):
        changed = bytearray(PICKLED)
        changed[i] ^= 1
        with pytest.raises(UsageError):
            marks.refuse_unknown(bytes(changed))


def test_marks_of_another_user_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their key is another, though the folder holds both the bytes and the marks."""
    ObjectMarks(tmp_path / "marks", 0).add(PICKLED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(UsageError, match="another user or machine"):
        ObjectMarks(tmp_path / "marks", 1).refuse_unknown(PICKLED)
    ObjectMarks(tmp_path / "marks", 1, trusted=True).refuse_unknown(PICKLED)


def test_damaged_marks_mark_nothing(tmp_path: Path) -> None:
    """Lines that are none, and a file that is no text."""
    ObjectMarks(tmp_path, 0).add(PICKLED)
    (tmp_path / "objects-1.marks").write_bytes(b"\xff\xfe\0")
    (tmp_path / "objects-2.marks").write_text("nothing\n\n")
    ObjectMarks(tmp_path, 3).refuse_unknown(PICKLED)
    (tmp_path / "objects-0.marks").write_text("0" * 64)
    with pytest.raises(UsageError):
        ObjectMarks(tmp_path, 3).refuse_unknown(PICKLED)


def test_a_key_is_made_once_and_for_its_user_alone(cache: Path) -> None:
    """One that others may read is refused."""
    key = user_key()
    assert user_key() == key
    path = cache / "objects.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in cache.iterdir()] == ["objects.key"]
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match="nobody else may read"):
        user_key()
