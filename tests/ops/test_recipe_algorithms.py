"""Algorithms as a recipe names them: what a name fills in, what counts beside it, and what cannot be right."""

from pathlib import Path

import pytest

from actors.trainer.presets import PRESETS
from ops.recipe import Recipe, load_recipe
from schemas import UserError

RECIPE = Path(__file__).parents[2] / "recipes" / "running_total.yaml"


def plain(tmp_path: Path, trainer: str) -> Path:
    """A recipe whose trainer section is `trainer`."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "data.jsonl").write_text("{}")
    file = tmp_path / "plain.yaml"
    file.write_text(
        "name: plain\nsteps: 3\nmodel: {path: ./model}\ndata: {train: data.jsonl}\nevaluation: {count: 0}\n"
        f"trainer: {trainer}\n"
    )
    return file


@pytest.mark.parametrize("algorithm", PRESETS)
def test_an_algorithm_is_shown_resolved_and_read_back_alike(algorithm: str) -> None:
    """recipe.yaml in the run's folder tells every key, and other nodes read it from the bus."""
    recipe = load_recipe(RECIPE, [f"trainer.algorithm={algorithm}"])
    assert recipe.trainer.algorithm == algorithm
    for key, value in PRESETS[algorithm].items():
        assert f"  {key}:" in recipe.to_yaml()
        if not isinstance(value, dict):
            assert getattr(recipe.trainer, key) == value
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_what_a_recipe_says_beside_its_algorithm_counts(tmp_path: Path) -> None:
    """A preset is a set of defaults: key by key, in nested sections too."""
    recipe = load_recipe(plain(tmp_path, "{algorithm: dapo, clip_high: 0.3, advantage: {eps: 0.1}, overlong: null}"))
    assert recipe.trainer.clip_high == 0.3
    assert recipe.trainer.advantage.eps == 0.1
    assert recipe.trainer.advantage.std == "group"
    assert recipe.trainer.overlong is None
    assert recipe.controller.filter == "zero_variance"
    kept = load_recipe(plain(tmp_path, "{algorithm: dapo}"), ["controller.filter=none"])
    assert kept.controller.filter == "none"


def test_an_algorithm_on_the_command_line_replaces_the_finer_keys_of_the_file() -> None:
    """The default recipe names its loss and clip: without this rule such an override would silently do nothing."""
    recipe = load_recipe(RECIPE, ["trainer.clip_high=0.5", "trainer.algorithm=gspo"])
    assert (recipe.trainer.loss, recipe.trainer.clip, recipe.trainer.clip_high) == ("gspo", 3e-4, 0.5)
    assert recipe.trainer.lr == load_recipe(RECIPE).trainer.lr


def test_a_recorded_recipe_can_be_replayed_with_another_algorithm() -> None:
    """It lies resolved in the log, so all its finer keys are given."""
    recorded = Recipe.from_yaml(load_recipe(RECIPE, ["trainer.algorithm=dapo"]).to_yaml())
    other = recorded.changed(["trainer.algorithm=ppo"], "the recipe")
    assert other.trainer.critic is not None
    assert other.trainer.overlong is None
    assert other.trainer.clip_high is None
    assert other.controller.filter == "none"


def test_a_recipe_without_an_algorithm_is_what_it_was() -> None:
    """Recorded recipes are read later."""
    recipe = load_recipe(RECIPE)
    assert recipe.trainer.algorithm is None
    assert (recipe.trainer.loss, recipe.trainer.aggregation, recipe.trainer.proximal) == (
        "decoupled_ppo",
        "token_mean",
        "recompute",
    )


@pytest.mark.parametrize("name", ["tis", "icepop", "mis", "geometric"])
def test_a_correction_can_be_named(name: str) -> None:
    recipe = load_recipe(RECIPE, [f"trainer.behaviour_weight={name}"])
    assert recipe.trainer.behaviour_weight.upper is not None
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    ("overrides", "wrong", "remedy"),
    [
        (["trainer.kl.coef=0.1"], "without a reference policy", "Set reference to initial"),
        (["trainer.reference=initial", "trainer.kl={coef: 0.1, estimator: k1}"], "k1 in the loss", "place to reward"),
        (["trainer.algorithm=gropo"], "trainer.algorithm is 'gropo'", "Did you mean grpo?"),
        (["trainer.loss=gsop"], "'gsop' is no loss", "Use one of decoupled_ppo"),
        (["trainer.loss=a_loss_of_mine.py:loss"], "no file", "Correct the path"),
        (["trainer.advantage.function=mine"], "'mine' names no function", "file.py:function"),
        (["trainer.behaviour_weight=tiss"], "'tiss' is no correction", "Use one of tis"),
        (["trainer.loss=cispo", "trainer.dual_clip=3"], "no ratio to clip twice", "Remove dual_clip"),
        (["trainer.loss=sapo", "trainer.proximal=loglinear"], "takes no proximal policy", "decoupled loss"),
        (["trainer.algorithm=m2po", "trainer.proximal=rollout"], "m2po_threshold with proximal", "recompute"),
        (["trainer.advantage.function=a.b:c", "trainer.critic={}"], "never be asked", "Remove one"),
        (["trainer.advantage.function=a.b:c", "trainer.unfinished=no_reward"], "takes the place of", "mask or train"),
        (["trainer.advantage.function=a.b:c", "trainer.reference=initial", "trainer.kl={coef: 0.1, place: reward}"],
         "the penalty would be lost", "kl.place to loss"),
        (["controller.group_size=1"], "nothing to compare", "2 or more"),
        (["controller.group_size=1", "trainer.algorithm=dapo", "trainer.advantage.mean=none",
          "trainer.advantage.std=none"], "no batch would ever fill", "controller.filter to none"),
        (["rollout.top_p=0.9", "trainer.algorithm=gspo"], "silent bias", "top_p: 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_with_the_reason(overrides: list[str], wrong: str, remedy: str) -> None:
    """At the start, not after an hour."""
    with pytest.raises(UserError) as refused:
        load_recipe(RECIPE, overrides)
    assert wrong in refused.value.message
    assert remedy in refused.value.remedy


def test_one_sample_a_prompt_is_enough_where_nothing_is_compared_within_groups() -> None:
    """PPO and REINFORCE++ need no groups."""
    for algorithm in ("ppo", "reinforce_pp"):
        assert load_recipe(RECIPE, ["controller.group_size=1", f"trainer.algorithm={algorithm}"])
