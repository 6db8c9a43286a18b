"""What is known of a run's error, by what others measured."""

from __future__ import annotations

from prismscale.analysis.known_errors import known_error


def test_a_preset_has_the_errors_of_its_gpu() -> None:
    """Measured steps on H100s tell of every preset with them."""
    known = known_error("step", "h100-sxm")
    assert known is not None
    assert known == known_error("step", "h100-96g")


def test_a_cluster_of_ones_own_has_no_measured_steps() -> None:
    """Its name may begin like a preset's and its GPU be another; memory is no matter of the GPU."""
    assert known_error("step", "h100-sxm-half-the-bandwidth") is None
    assert known_error("reserved", "h100-sxm-half-the-bandwidth") == known_error("reserved", "b200")
