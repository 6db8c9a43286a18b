"""What is known of a run's error, by what others measured."""

from __future__ import annotations

from prismscale.analysis.known_errors import HOST_BOUND, known_error, known_step_error


def test_a_preset_has_the_errors_of_its_gpu() -> None:
    """Measured steps on H100s tell of every preset with them."""
    known = known_error("step", "h100-sxm")
    assert known is not None
    assert known == known_error("step", "h100-96g")


def test_a_cluster_of_ones_own_has_no_measured_steps() -> None:
    """Its name may begin like a preset's and its GPU be another; memory is no matter of the GPU."""
    assert known_error("step", "h100-sxm-half-the-bandwidth") is None
    assert known_error("reserved", "h100-sxm-half-the-bandwidth") == known_error("reserved", "b200")


def test_a_step_that_the_host_decides_has_the_errors_of_such_steps() -> None:
    """Where they were measured; elsewhere those of any step."""
    host_bound = known_step_error(0.9, "h100-sxm")
    assert host_bound is not None
    assert host_bound.figure == HOST_BOUND
    assert known_step_error(0.1, "h100-sxm") == known_error("step", "h100-sxm")
    assert known_step_error(0.9, "b200") == known_error("step", "b200")
