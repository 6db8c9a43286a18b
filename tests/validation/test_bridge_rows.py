"""Published steps of Megatron-Bridge's recipes: which row is a recipe's, and how long it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.cluster import Cluster
from prismscale.validation.steps import bridge_rows
from prismscale.validation.steps.bridge_rows import RECIPES, BridgeRecipe, load_bridge_steps

HEAD = "System,#-GPUs,Precision,GBS,MBS,Sequence Length,TP,PP,CP,VP,EP,Tokens / sec / GPU,TFLOP"
CASE = "llama3_70b, fp8_cs, 64 gb300"


def title(container: str, task: str = "Pre-Training") -> str:
    return f'#table,"Archive > {container} NeMo Container > {task} Performance > Model: LLAMA3_70B"'


def row(tokens: str, *, batch: int = 256, system: str = "DGX-GB300") -> str:
    return f"{system},64,FP8,{batch},2,8192,1,1,1,n/a,n/a,{tokens},2348"


def write(folder: Path, *lines: str) -> None:
    path = folder / bridge_rows.TABLE
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def one_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_rows, "RECIPES", (BridgeRecipe.parse(CASE),))


def test_a_step_is_its_tokens_over_what_all_gpus_do(tmp_path: Path, one_recipe: None) -> None:
    """256 sequences of 8,192 tokens on 64 GPUs."""
    write(tmp_path, title("26.04"), HEAD, row("4096"))

    (step,) = load_bridge_steps(tmp_path)

    assert step.step_ms == pytest.approx(1000 * 256 * 8192 / 64 / 4096)
    assert step.recipe.cluster == "gb300"


def test_the_newest_row_without_a_footnote_is_a_recipes(tmp_path: Path, one_recipe: None) -> None:
    """The table has the newest container first; footnotes tell of regressions."""
    known = row("1000").replace("2348", "2348[^known-issue]")
    older = (title("26.04"), HEAD, row("3000"))
    write(tmp_path, title("26.06.01"), HEAD, known, title("26.06"), HEAD, row("2000"), *older)

    (step,) = load_bridge_steps(tmp_path)

    assert (step.container, step.release, step.tokens_per_s) == ("26.06", "0.5", 2000)


def test_tuning_is_not_pre_training(tmp_path: Path, one_recipe: None) -> None:
    """A recipe whose only row is of another task has none."""
    write(tmp_path, title("26.06", "LoRA"), HEAD, row("4096"))

    with pytest.raises(ValueError, match="no row for llama3_70b"):
        load_bridge_steps(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.case)
def test_a_case_reads_back_equal_and_has_a_cluster(recipe: BridgeRecipe) -> None:
    """Each is listed once, of a model that is known."""
    assert BridgeRecipe.parse(recipe.case) == recipe
    assert recipe.cluster in Cluster.presets()
    assert recipe.model in bridge_rows.MODELS
    assert RECIPES.count(recipe) == 1


def test_a_damaged_case_is_named() -> None:
    """As it was given."""
    with pytest.raises(ValueError, match="'llama' is no case"):
        BridgeRecipe.parse("llama")
