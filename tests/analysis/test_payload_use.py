"""What is said of the sources of values."""

from __future__ import annotations

import pytest

from prismscale.analysis.payload_use import MIRRORED, PayloadKind, mirror_blamed
from prismscale.errors import MismatchError, StuckError, UsageError


@pytest.mark.parametrize("kind", [MismatchError, StuckError])
def test_ranks_that_do_not_fit_together_blame_the_mirror(kind: type[Exception]) -> None:
    """It may have let them decide otherwise than in the job."""
    with pytest.raises(kind, match="rank 3 waits") as told, mirror_blamed(PayloadKind.MIRROR):
        raise kind("rank 3 waits")
    assert str(told.value).endswith(MIRRORED)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(PayloadKind.RECORDED, StuckError("rank 3 waits")), (PayloadKind.MIRROR, UsageError("no"))],
)
def test_other_errors_stay_as_they_are(kind: PayloadKind, error: Exception) -> None:
    """Other sources, and errors that have nothing to do with values."""
    with pytest.raises(type(error)) as told, mirror_blamed(kind):
        raise error
    assert told.value is error
