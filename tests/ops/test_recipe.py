"""A recipe is the one thing that every user writes: mistakes in it must be told in words that mend them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.recipe import Recipe, load_recipe
from schemas import UserError

RECIPES = Path(__file__).parents[2] / "recipes"

MINIMAL: dict[str, Any] = {
    "name": "my-run",
    "steps": 10,
    "model": {"path": "./model"},
    "data": {"train": "rows.jsonl", "eval": "held_out.jsonl"},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A recipe of few keys, with the files that it names."""
    for name in ("rows.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "2+3=", "answer": "5"}\n')
    (tmp_path / "task.py").write_text("def reward(response, task): return 1.0\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def refused(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return caught.value


def test_a_recipe_of_few_keys_takes_the_actors_own_defaults(recipe_file: Path) -> None:
    """A section that is left out must not differ from the actor's config."""
    recipe = load_recipe(recipe_file)
    assert recipe.controller.max_staleness == 4
    assert recipe.batch_samples == recipe.controller.batch_groups * recipe.controller.group_size
    assert recipe.base == recipe_file.parent.resolve()
    assert recipe.sft is None


def test_an_evaluation_beside_an_agent_is_refused_and_beside_other_episodes_it_runs_them(recipe_file: Path) -> None:
    """Agents ask over HTTP; a score without the agent would be of something else than what is trained."""
    for episode in ("{agent: external}", "{command: [python3]}"):
        told = refused(recipe_file, f"episode={episode}")
        assert "evaluation.count 256" in str(told)
        assert "an agent asks over HTTP" in str(told)
        assert load_recipe(recipe_file, [f"episode={episode}", "evaluation.count=0"]).episode is not None
    for function in ("single", "multi_turn", "tool"):
        assert load_recipe(recipe_file, [f"episode={{function: {function}}}"]).evaluation.count == 256


@pytest.mark.parametrize("name", ["running_total.yaml", "smollm2.yaml"])
def test_the_recipes_that_we_ship_are_valid(name: str) -> None:
    """The first command that a person gives."""
    recipe = load_recipe(RECIPES / name)
    assert recipe.name == name.removesuffix(".yaml").replace("_", "-")
    assert recipe.seed == recipe.trainer.seed


def test_the_template_is_valid_once_its_files_are_there(tmp_path: Path) -> None:
    """`init` hands it to people who copy it: every key in it must be one, also the commented ones."""
    text = (RECIPES / "template.yaml").read_text()
    (tmp_path / "data").mkdir()
    for name in ("data/train.jsonl", "data/held_out.jsonl", "my_task.py"):
        (tmp_path / name).touch()
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert load_recipe(path).reward.function == "exact"
    warm_start = text.replace("# sft:", "sft:")
    for key in ("examples", "steps", "batch_tokens", "lr"):
        warm_start = warm_start.replace(f"#   {key}:", f"  {key}:")
    path.write_text(warm_start)
    sft = load_recipe(path).sft
    assert sft is not None
    assert sft.examples == "my_task.py:demonstration"
    assert sft.steps == 500


def test_overrides_reach_into_sections_and_their_values_are_yaml(recipe_file: Path) -> None:
    """`1e-4` is text in YAML 1.1, a list is a list, null takes a section away."""
    recipe = load_recipe(
        recipe_file,
        ["trainer.lr=1e-4", "steps=3", "rollout.stop=['</s>', end]", "trainer.advantage.std=none", "data.eval=null",
         "evaluation.count=0", "name=other=1".replace("=1", "")],
    )  # fmt: skip
    assert recipe.trainer.lr == 1e-4
    assert recipe.steps == 3
    assert recipe.rollout.stop == ("</s>", "end")
    assert recipe.trainer.advantage.std == "none"
    assert recipe.trainer.advantage.mean == "group"
    assert recipe.data.eval is None
    assert recipe.name == "other"


def test_the_seed_of_the_run_is_that_of_every_section_which_names_none(recipe_file: Path) -> None:
    """Three seeds of a recipe are three runs, not one run with other data."""
    recipe = load_recipe(recipe_file, ["seed=7", "sft.examples=task.py:reward"])
    assert recipe.sft is not None
    assert (recipe.trainer.seed, recipe.sft.seed) == (7, 7)
    assert load_recipe(recipe_file, ["seed=7", "trainer.seed=3"]).trainer.seed == 3


def test_a_resolved_recipe_survives_its_way_over_the_bus(recipe_file: Path) -> None:
    """Other nodes join by the bus alone: they read the recipe as text from the log."""
    recipe = load_recipe(
        recipe_file, ["seed=5", "sft.examples=task.py:reward", "trainer.clip_high=0.28", "bus.ack_wait_s=2"]
    )
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_the_log_holds_no_password(recipe_file: Path) -> None:
    """Recordings are passed on; whoever joins knows the server already."""
    recipe = load_recipe(recipe_file, ["bus.url=nats://user:secret@host:4222"])
    logged = recipe.to_log()
    assert "secret" not in logged
    assert Recipe.from_yaml(logged).model_dump(exclude={"bus"}) == recipe.model_dump(exclude={"bus"})


@pytest.mark.parametrize(
    ("override", "wrong", "remedy"),
    [
        ("slots=3", "no key slots", "rollout.slots"),
        ("rollout.slot=3", "no key rollout.slot", "rollout.slots"),
        ("trainer.behaviour_weight.uper=3", "no key trainer.behaviour_weight.uper", "trainer.behaviour_weight.upper"),
        ("zzz=3", "no key zzz", "name, seed, steps, model"),
        ("rollout.slots=0", "rollout.slots is 0", "greater than or equal to 1"),
        ("trainer.clip=1.5", "trainer.clip is 1.5", "less than 1"),
        ("steps=many", "steps is 'many'", "valid integer"),
        ("controller.filter=zero_varianc", "controller.filter is 'zero_varianc'", "Did you mean zero_variance?"),
        ("name=My Run", "name is 'My Run'", "lower-case"),
        (f"name={'x' * 48}", "name is", "at most 47"),
        ("rollout=3", "rollout is 3", "section"),
        ("trainer.betas=[0.9]", "trainer.betas", "too few"),
        ("trainer.betas=[0.9, 0.99, 1]", "trainer.betas", "hold 2 at most"),
        ("trainer.betas=fast", "trainer.betas is 'fast'", "a list"),
        ("trainer.betas=[0.9, 2]", "trainer.betas.1 is 2", "less than 1"),
        ("trainer.lora.targets=[]", "trainer.lora.targets is []", "hold 1 at least"),
        ("trainer.lr=inf", "trainer.lr is 'inf'", "finite"),
        ("trainer.reward_bias=.nan", "trainer.reward_bias is nan", "finite"),
        ("trainer.behaviour_weight.upper=0", "nothing would be in bounds", "above 0"),
        ("model.make=task.py:reward", "model.path or model.make", ""),
        ("steps.x=3", "steps.x reaches into steps", ""),
        ("steps", "no override", "key=value"),
        ("steps=[", "not YAML", "Quote"),
        ("reward.function=tsk.py:reward", "reward.function names tsk.py:reward", "task.py"),
        ("data.train=row.jsonl", "data.train names row.jsonl", "rows.jsonl"),
        ("data.train=elsewhere/rows.jsonl", "no file", "no folder"),
        ("base=/tmp", "base", ""),
        # what cannot be right, although each value could be
        ("rollout.top_p=0.9", "silent bias", "top_p: 1"),
        ("rollout.top_k=50", "silent bias", "top_k: 0"),
        ("controller.group_size=1", "every advantage would be 0", "group_size to 2"),
        ("trainer.minibatches=500", "empty", "Lower"),
        ("data.eval=null", "trained on", "data.eval"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_its_remedy(
    recipe_file: Path, override: str, wrong: str, remedy: str
) -> None:
    """One sentence on what is wrong and where, one on what would be right."""
    error = refused(recipe_file, override)
    assert wrong in error.message
    assert remedy in error.remedy
    assert error.remedy
    assert "\n" not in str(error)


def test_the_sentence_names_the_file_and_the_override_that_broke_it(recipe_file: Path) -> None:
    """A person looks for the mistake where it is: in the file, or in the command."""
    assert "'rollout.slots=0' on the command line" in refused(recipe_file, "rollout.slots=0").message
    recipe_file.write_text(recipe_file.read_text() + "rollout: {slots: 0}\n")
    error = refused(recipe_file)
    assert error.message.startswith(f"{recipe_file}: ")
    assert "command line" not in error.message


def test_a_group_of_one_is_no_mistake_where_nothing_is_compared_within_groups(recipe_file: Path) -> None:
    """REINFORCE++ compares with the batch; refusing that would take a method away."""
    overrides = ["controller.group_size=1", "trainer.advantage.mean=batch", "trainer.advantage.std=batch"]
    assert load_recipe(recipe_file, overrides).controller.group_size == 1
    filtered = refused(recipe_file, *overrides, "controller.filter=zero_variance")
    assert "no batch would ever fill" in filtered.message


def test_several_mistakes_are_counted_and_the_first_is_told(recipe_file: Path) -> None:
    """An unknown key comes first, since the others often follow from it."""
    error = refused(recipe_file, "rollout.slots=0", "rollout.slotss=3")
    assert "no key rollout.slotss" in error.message
    assert "1 more" in error.remedy


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "holds no recipe"),
        ("- a\n- b\n", "holds no recipe"),
        ("name: [\n", "line 2"),
        ("name: a\nname: b\n", "line 2: the key name occurs twice"),
        ("model: {path: a, path: b}\n", "the key path occurs twice"),
        ("name: a\n", "is missing"),
        ("name: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("<<: {name: a}\n", "is missing"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_with_its_line(tmp_path: Path, text: str, wrong: str) -> None:
    """YAML takes the last of two equal keys without a word, and object tags are code: both are refused."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    error = refused(path)
    assert str(path) in error.message
    assert wrong in error.message


def test_a_recipe_that_is_not_there_is_looked_for_nearby(recipe_file: Path) -> None:
    """The commonest mistake of all."""
    assert "recipe.yaml" in refused(recipe_file.with_name("recip.yaml")).remedy
    assert "cannot be read" in refused(recipe_file.parent).message


def test_the_servers_of_a_cluster_may_be_a_list(tmp_path: Path) -> None:
    """On the bus and in `run.json` they are one URL with commas, as other NATS programs take it."""
    path = RECIPES / "running_total.yaml"
    servers = "[nats://a:4222, nats://b:4222, nats://c:4222]"
    recipe = load_recipe(path, [f"bus.url={servers}", "bus.replicas=3"])
    assert recipe.bus.url == "nats://a:4222,nats://b:4222,nats://c:4222"
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    with pytest.raises(UserError, match="replicas"):
        load_recipe(path, ["bus.replicas=2"])
