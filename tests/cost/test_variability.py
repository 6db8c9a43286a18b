"""Variability profiles: those that come with prismscale, and what a user's may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.cluster import Cluster
from prismscale.cost.variability import RegimeVariation, VariabilityProfile
from prismscale.errors import FormatError, UsageError


@pytest.mark.parametrize("name", VariabilityProfile.presets())
def test_every_profile_names_its_sources_and_survives_being_written(name: str) -> None:
    profile = VariabilityProfile.load(name)

    assert profile.name == name
    assert profile.sources
    assert VariabilityProfile.from_toml(profile.to_toml()) == profile


def test_clusters_of_gpus_name_a_profile_that_exists() -> None:
    named = {name: Cluster.load(name).variability for name in Cluster.presets()}

    assert named.pop("loopback-gloo") == ""
    assert set(named.values()) <= set(VariabilityProfile.presets())


def test_kinds_that_are_not_named_take_the_default() -> None:
    profile = VariabilityProfile.load("measured")

    assert profile.kernel("norm") == profile.kernels["default"]
    assert profile.kernel("gemm") != profile.kernels["default"]


def test_a_users_file_is_named_after_itself(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text("[kernels.gemm]\ntemporal_cv = 0.02\n")

    profile = VariabilityProfile.load(tmp_path / "ours.toml")

    assert profile.name == "ours"
    assert profile.kernel("gemm").temporal_cv == 0.02
    assert profile.kernel("norm").temporal_cv == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[kernels.gemm]\ntemporal_cv = -0.1", r"kernels.gemm: temporal_cv is -0.1; allowed: 0"),
        ("[kernels.gemm]\nspatial_cv = 1.64", r"a share: write 0.0164 for 1.64 %"),
        ("[kernels.gem]\nspatial_cv = 0.01", r"unknown kind of kernel 'gem'.*did you mean gemm"),
        ("[links.nvlnk]\npair_cv = 0.01", r"unknown scope of links 'nvlnk'.*did you mean nvlink"),
        ("[links.rail]\ntail_factor = 0.5", r"links.rail: tail_factor is 0.5; allowed: 1"),
        ("[kernels.gemm]\ncv = 0.1", r"unknown key 'kernels.gemm.cv'"),
        ("[stalls]\nmean_s = 1e6", r"stalls: mean_s is 1000000.0; allowed: 0"),
        ("[stalls]\nlong_per_job_hour = -1", r"stalls: long_per_job_hour is -1.*allowed: 0"),
        ("node_share = 2.0", r"node_share is 2.0; allowed: 0"),
        ("[kernels", r"not valid TOML"),
    ],
)
def test_what_no_fleet_has_is_refused_with_what_is_allowed(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "odd.toml").write_text(text)

    with pytest.raises(FormatError, match=said):
        VariabilityProfile.load(tmp_path / "odd.toml")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown variability 'mesured'.*did you mean measured"):
        VariabilityProfile.load("mesured")


def test_noise_averages_out_over_long_steps_and_drift_does_not() -> None:
    regimes = RegimeVariation(cv_of_one_second=0.004, drift_cv=0.001)

    assert regimes.step_cv(0.25) == pytest.approx(0.00806, rel=1e-3)
    assert regimes.step_cv(1e-3) == regimes.step_cv(0.15)
    assert regimes.step_cv(10_000) == pytest.approx(0.001, rel=1e-2)
