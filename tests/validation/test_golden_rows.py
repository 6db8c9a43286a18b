"""Public steps of Megatron-LM's functional tests: which are taken, and which are scored."""

from __future__ import annotations

from pathlib import Path

from prismscale.validation.steps import golden_rows
from prismscale.validation.steps.golden_rows import load_golden_steps

HEAD = "group,test,iter_median_s"


def write(folder: Path, *rows: str) -> None:
    path = folder / golden_rows.INDEX
    path.parent.mkdir(parents=True)
    path.write_text("\n".join((HEAD, *rows)) + "\n")


def test_a_step_is_what_its_test_logged(tmp_path: Path) -> None:
    """In milliseconds."""
    write(tmp_path, "moe,gpt3_moe_mcore,0.25")

    (step,) = load_golden_steps(tmp_path)

    assert (step.name, step.family, step.step_ms) == ("gpt3_moe_mcore", "experts", 250.0)


def test_only_families_on_which_nothing_rests_are_scored(tmp_path: Path) -> None:
    """The host's time for an operator was fitted on GPTs."""
    write(tmp_path, "gpt,gpt3_mcore_te,0.1", "t5,t5_mcore,0.1", "bert,bert_mcore,0.1")

    scored = [step.name for step in load_golden_steps(tmp_path) if step.is_scored]

    assert scored == ["t5_mcore", "bert_mcore"]


def test_runs_that_cannot_be_stated_are_left_out(tmp_path: Path) -> None:
    """Reinforcement learning, images, an unknown number of GPUs, no times."""
    left_out = ("gpt_grpo_tp1", "mimo_vlm", "mixtral_8x22b_release", "gpt3_mcore_reruns")
    times = ("1.0", "1.0", "1.0", "")
    rows = [f"gpt,{name},{time}" for name, time in zip(left_out, times, strict=True)]
    write(tmp_path, *rows)

    assert load_golden_steps(tmp_path) == []
