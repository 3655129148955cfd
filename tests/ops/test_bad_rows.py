"""A bad row is named by its place with what is wrong, and stops the run or is skipped, never in silence, never all."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.datasets import DataConfig, FileRows, GeneratedRows, load_dataset
from schemas import UserError

GOOD = b'{"prompt": "a", "answer": "1"}\n'
BAD = {
    b'{"prompt": "a"\n': "this is no JSON",
    b"\xff\xfe\n": "this is no UTF-8",
    b'{"answer": "1"}\n': "the row has no 'prompt', only answer",
    b'{"prompt": " "}\n': "the prompt is empty",
    b'{"prompt": []}\n': "the prompt is empty",
    b'{"prompt": 3}\n': "the prompt is int",
    b'{"prompt": ["a"]}\n': "message 0 of the prompt has no 'role'",
    b"[1]\n": "the row is list, not a map",
    b'{"prompt": "a", "answer": NaN}\n': "NaN is no JSON number",
    b'{"prompt": "a", "answer": 1e999}\n': "'answer' is no finite number",
    b'{"prompt": "a", "answer": {"x": [1, -1e999]}}\n': "'answer'['x'][1] is no finite number",
    b'{"prompt": "a", "answer": "\\ud800"}\n': "half a surrogate pair",
    b'{"messages": "a"}\n': "'messages' is str, not a list",
    b"[" * 100_000 + b"\n": "this is nested too deep",
}


def load(base: Path, held_out: bool = False, count_tokens: Any = None, **config: Any) -> FileRows:
    fields = {"train": "data.jsonl", "shuffle": False} | config
    data = load_dataset(DataConfig(**fields), base, held_out=held_out, count_tokens=count_tokens)
    assert isinstance(data, FileRows)
    return data


@pytest.mark.parametrize(("line", "says"), BAD.items(), ids=lambda value: str(value)[:30])
def test_each_is_named_and_stops_the_run(line: bytes, says: str, tmp_path: Path) -> None:
    """By default: a file with a bad row may have others that only look right."""
    (tmp_path / "data.jsonl").write_bytes(GOOD + line + GOOD)
    with pytest.raises(UserError) as told:
        load(tmp_path)
    assert f"{tmp_path / 'data.jsonl'}, line 2: " in told.value.message
    assert says in told.value.message
    assert told.value.remedy


def test_all_are_skipped_and_counted_if_the_recipe_says_so(tmp_path: Path) -> None:
    """Rows keep their order, and the first bad ones are told."""
    (tmp_path / "data.jsonl").write_bytes(b"".join(GOOD * 30 + line for line in BAD))
    data = load(tmp_path, on_bad_row="skip")
    assert len(data) == 30 * len(BAD)
    assert data.report.bad_rows == len(BAD)
    assert len(data.report.bad) == 5
    assert "data.jsonl, line 31: this is no JSON" in data.report.bad[0]
    assert data.report.in_words() == "data.jsonl: 420 rows (rows), 14 bad rows skipped"


def test_too_many_bad_rows_stop_the_run_though_they_are_skipped(tmp_path: Path) -> None:
    """A wrong column name makes all rows bad; to train on the rest would be a mistake that nobody sees."""
    (tmp_path / "data.jsonl").write_bytes(GOOD * 9 + b"{\n" * 1)
    with pytest.raises(UserError, match=r"1 of 10 rows are bad; data\.bad_rows_max lets 5% pass\. .*line 10: ") as told:
        load(tmp_path, on_bad_row="skip")
    assert "data.bad_rows_max" in str(told.value.remedy)
    assert len(load(tmp_path, on_bad_row="skip", bad_rows_max=0.1)) == 9
    (tmp_path / "data.jsonl").write_bytes(b"{\n" * 7)
    with pytest.raises(UserError, match=r"7 of 7 rows are bad.* And 2 more\."):
        load(tmp_path, on_bad_row="skip", bad_rows_max=0.99)


def test_a_last_line_that_is_half_written_is_told_as_such(tmp_path: Path) -> None:
    """Whoever writes the file may still be at it, or have run out of disk."""
    (tmp_path / "data.jsonl").write_bytes(GOOD + GOOD[:-12])
    with pytest.raises(UserError, match="line 2: the last line is cut short"):
        load(tmp_path)


def test_duplicates_are_kept_skipped_or_stop_the_run(tmp_path: Path) -> None:
    """Some repeat rows on purpose; others train on the same problem twice and do not know."""
    other = b'{"answer": "1", "prompt": "a"}\n'  # the same row, with its keys in another order
    (tmp_path / "data.jsonl").write_bytes(GOOD + b'{"prompt": "b"}\n' + other)
    assert len(load(tmp_path)) == 3
    skipped = load(tmp_path, on_duplicate="skip")
    assert [skipped.row(k)["prompt"] for k in range(2)] == ["a", "b"]
    assert skipped.report.in_words() == "data.jsonl: 2 rows (rows), 1 duplicate"
    with pytest.raises(UserError, match=r"line 3: the row equals that of .*data\.jsonl, line 1"):
        load(tmp_path, on_duplicate="stop")


def test_a_prompt_that_is_too_long_by_tokens_is_a_bad_row(tmp_path: Path) -> None:
    """Counted as the model gets it, in its template."""
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a b"}\n{"prompt": "a b c d"}\n')
    config = {"template": "say {prompt} now", "max_prompt_tokens": 4}

    def count(prompt: str) -> int:
        return len(prompt.split())

    with pytest.raises(UserError, match="line 2: the prompt has 6 tokens, more than 4"):
        load(tmp_path, count_tokens=count, **config)
    assert len(load(tmp_path, count_tokens=count, on_bad_row="skip", bad_rows_max=0.5, **config)) == 1


def test_a_row_too_large_for_a_message_is_told_before_it_is_sent(tmp_path: Path) -> None:
    """The server would refuse it in the middle of the run."""
    row = {"prompt": "a", "pages": ["x" * 1_000_000] * 5}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="line 1: the row has more than 4,000,000 bytes"):
        load(tmp_path)


def test_bad_rows_of_parquet_are_named_by_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"prompt": ["a", "b", None], "x": [1.0, float("nan"), 2.0]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "data.parquet")
    with pytest.raises(UserError, match=r"data\.parquet, row 1: 'x' is no finite number"):
        load(tmp_path, train="data.parquet")
    with pytest.raises(UserError, match=r"data\.parquet, row 2: the prompt is NoneType"):
        load(tmp_path, train="data.parquet", columns={"prompt": "prompt"})


def test_columns_pick_and_rename(tmp_path: Path) -> None:
    """Most files name their columns in another way, and hold more than the reward needs."""
    (tmp_path / "data.jsonl").write_text('{"q": "2+3", "gold": 5, "junk": 1}\n{"q": "2+4", "junk": 1}\n')
    config = {"columns": {"prompt": "q", "answer": "gold"}}
    with pytest.raises(UserError, match=r"line 2: the row has no 'gold', which data\.columns names for 'answer', only"):
        load(tmp_path, **config)
    data = load(tmp_path, on_bad_row="skip", bad_rows_max=0.5, **config)
    assert data.row(0) == {"prompt": "2+3", "answer": 5}


def test_a_function_draws_again_for_a_bad_row_and_always_the_same(tmp_path: Path) -> None:
    """A draw's row must not depend on which draws were made before."""
    (tmp_path / "task.py").write_text(
        "def problem(rng): return {'prompt': '' if rng.random() < 0.5 else str(rng.random())}"
    )
    with pytest.raises(UserError, match=r"'task\.py:problem', draw \d+: the prompt is empty"):
        [load_dataset(DataConfig(train="task.py:problem"), tmp_path).row(k) for k in range(20)]
    first, second = (load_dataset(DataConfig(train="task.py:problem", on_bad_row="skip"), tmp_path) for _ in range(2))
    assert isinstance(second, GeneratedRows)
    rows = [first.row(k) for k in range(30)]
    assert [second.row(k) for k in reversed(range(30))] == rows[::-1]
    assert sum(len(second.attempt(k)[1]) for k in range(30)) > 5
    (tmp_path / "never.py").write_text("def problem(rng): return {}")
    with pytest.raises(UserError, match=r"only nothing\. So were 100 rows in a row"):
        load_dataset(DataConfig(train="never.py:problem", on_bad_row="skip"), tmp_path).row(0)


def test_prompts_are_dressed_as_the_recipe_says(tmp_path: Path) -> None:
    """Text stays text unless a chat is asked for; braces of LaTeX are no placeholders."""
    rows = ['{"prompt": "{x}"}', '{"prompt": [{"role": "user", "content": "hi"}]}']
    rows += ['{"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}, '
             '{"role": "assistant", "content": "a"}]}']  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(rows))

    def prompts(**config: Any) -> list[Any]:
        data = load(tmp_path, **config)
        return [data.row(k)["prompt"] for k in range(3)]

    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}]
    assert prompts() == ["{x}", [{"role": "user", "content": "hi"}], own]
    assert prompts(chat=True)[0] == [{"role": "user", "content": "{x}"}]
    system = {"role": "system", "content": "Be brief."}
    assert prompts(system="Be brief.") == [
        [system, {"role": "user", "content": "{x}"}],
        [system, {"role": "user", "content": "hi"}],
        own,
    ]
    boxed = prompts(template=r"{prompt} in \boxed{}")
    assert boxed[0] == r"{x} in \boxed{}"
    assert boxed[1] == [{"role": "user", "content": r"hi in \boxed{}"}]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"template": "no place"}, "template has no {prompt}"),
        ({"columns": {}}, "columns is empty"),
        ({"options": {"a": 1}}, "options are for reasoning_gym:TASK"),
        ({"template_options": {"tokenize": True}}, "template_options sets tokenize"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DataConfig(train="data.jsonl", **config)
