"""`rollstream data` shows what the model will see and what would stop a run, before a run is started."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ops.datasets import read_notes, write_notes
from ops.look import histogram, look, main, show
from ops.prepare import check_prompts, tokenizer_of
from ops.recipe import Recipe, load_recipe
from ops.text import HfTokenizer, prompt_counter
from schemas import UserError

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if think is defined %}{{ think }}{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single characters, with config.json as a model's folder has it, and no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    characters = {chr(code): code - 31 for code in range(32, 127)}
    words = Tokenizer(models.WordLevel({"<unk>": 0} | characters, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="~").save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def recipe_in(folder: Path, model: Path, rows: list[Any], **data: Any) -> Recipe:
    (folder / "data.jsonl").write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    fields = {
        "name": "looked-at", "steps": 1, "model": {"path": str(model)}, "evaluation": {"count": 0},
        "data": {"train": "data.jsonl", "shuffle": False} | data,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(fields))
    return load_recipe(folder / "recipe.yaml")


ROWS = [{"prompt": "x" * (number % 40 + 1), "answer": str(number)} for number in range(100)]


def shown(found: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(found, Recipe.model_fields["data"].annotation(train="data.jsonl"), console)  # type: ignore[misc]
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [80, 120])
def test_rows_lengths_and_examples_are_told_within_the_screen(width: int, tmp_path: Path, model: Path) -> None:
    recipe = recipe_in(tmp_path, model, ROWS)
    text = shown(look(recipe, False, 1000, 2, HfTokenizer(str(model))), width)
    assert "training: data.jsonl: 100 rows (rows)" in text
    assert "prompt tokens: mean 18, median 17, 95 % 38, longest 40" in text
    assert 'example 2, 2 tokens: the prompt\nxx\nfor the reward function\n{"answer": "1"}' in text
    assert "example 3" not in text
    assert max(map(len, text.splitlines())) <= width


def test_the_example_is_what_the_model_gets(tmp_path: Path, model: Path) -> None:
    """With the chat template of the recipe, its options and its system message."""
    (tmp_path / "chat.jinja").write_text(CHAT)
    recipe = recipe_in(
        tmp_path,
        model,
        [{"prompt": "2+3"}],
        system="Add.",
        chat_template="chat.jinja",
        template_options={"think": "no"},
    )
    tokenizer = tokenizer_of(recipe, str(model))
    found = look(recipe, False, 10, 1, tokenizer)
    assert found.examples[0].prompt == "<system>Add.<user>2+3no"
    tokenizer.save(tmp_path / "initial")
    worker = HfTokenizer(str(tmp_path / "initial"), recipe.data.template_options)
    row = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3"}]
    assert worker.text_of(worker.encode_prompt(row)) == found.examples[0].prompt, "saved with the model for all workers"


def test_bad_rows_and_why_a_run_would_stop_are_told(tmp_path: Path, model: Path, capsys: Any) -> None:
    recipe = recipe_in(tmp_path, model, [*ROWS, "{\n", ROWS[0]], max_prompt_tokens=39)
    assert main(recipe, True, 1000, 1, True, False) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "99 rows (rows), 3 bad rows, 1 duplicate" in text
    assert "line 101: this is no JSON" in text
    assert "line 40: the prompt has 40 tokens, more than 39" in text
    assert "data.on_bad_row is stop: a run would stop at the first bad row." in text


def test_a_program_can_read_it(tmp_path: Path, model: Path, capsys: Any) -> None:
    recipe = recipe_in(tmp_path, model, ROWS)
    assert main(recipe, True, 5, 1, False, True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["report"]["rows"], found["draws"], found["lengths"], found["stops"]) == (100, 5, [], None)


def test_a_chat_without_a_template_is_told_before_the_warm_start_with_the_remedy(tmp_path: Path, model: Path) -> None:
    recipe = recipe_in(tmp_path, model, ROWS, chat=True)
    with pytest.raises(UserError, match="has no chat template") as told:
        check_prompts(recipe, tokenizer_of(recipe, str(model)))
    assert "data.chat_template" in str(told.value.remedy)


def test_a_template_that_refuses_the_messages_is_told(tmp_path: Path, model: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    recipe = recipe_in(tmp_path, model, ROWS, chat=True, chat_template="chat.jinja")
    with pytest.raises(UserError, match="roles must alternate"):
        check_prompts(recipe, tokenizer_of(recipe, str(model)))


def test_a_template_that_is_not_there_is_told(tmp_path: Path, model: Path) -> None:
    recipe = recipe_in(tmp_path, model, ROWS, chat=True, chat_template="none.jinja")
    with pytest.raises(UserError, match=r"none\.jinja cannot be read"):
        tokenizer_of(recipe, str(model))


def test_bare_prompts_for_a_chat_model_and_another_reward_are_hinted_at(tmp_path: Path, model: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHAT)
    rows = [{"question": "2+3?", "answer": "#### 5"}]
    recipe = recipe_in(tmp_path, model, rows, chat_template="chat.jinja")
    hints = look(recipe, False, 10, 1, tokenizer_of(recipe, str(model))).hints
    assert "data.chat: true" in hints[0]
    assert hints[1] == "These rows are made for the reward function numeric; the recipe has exact."


def test_prompts_are_counted_only_where_their_length_is_bounded(tmp_path: Path, model: Path) -> None:
    """Loading a tokenizer costs seconds, and the controller needs none otherwise."""
    recipe = recipe_in(tmp_path, model, ROWS)
    assert prompt_counter(recipe.data, lambda: Path("nowhere")) is None
    bounded = recipe.changed(["data.max_prompt_tokens=7"], "recipe")
    counter = prompt_counter(bounded.data, lambda: model)
    assert counter is not None
    assert counter("abc") == 3


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_a_histogram_holds_each_length_once(lengths: list[int]) -> None:
    bins = histogram(lengths)
    assert len(bins) <= 10
    assert [count for _, _, count in bins] == [sum(low <= n <= high for n in lengths) for low, high, _ in bins]
    assert sum(count for _, _, count in bins) == len(lengths)


def test_looking_holds_no_objects_that_json_does_not_have(tmp_path: Path, model: Path) -> None:
    found = look(recipe_in(tmp_path, model, ROWS), False, 10, 1, None)
    assert json.loads(json.dumps(found.to_json())) == dataclasses.asdict(found)


def test_what_was_skipped_is_kept_for_the_runs_start_and_end(tmp_path: Path, model: Path) -> None:
    """A screen full of steps hides what was said before them."""
    rows = [*ROWS, *["{\n"] * 7]
    recipe = recipe_in(tmp_path, model, rows, on_bad_row="skip", bad_rows_max=0.1)
    assert read_notes(tmp_path) == ""
    write_notes(tmp_path, check_prompts(recipe, tokenizer_of(recipe, str(model))))
    first, *bad, last = read_notes(tmp_path).splitlines()
    assert first == "data: data.jsonl: 100 rows (rows), 7 bad rows skipped"
    assert len(bad) == 5
    assert "line 101: this is no JSON" in bad[0]
    assert last == "  and 2 more; `rollstream data` looks at them"
