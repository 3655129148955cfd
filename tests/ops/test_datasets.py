"""Where prompts come from."""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ops.datasets import DataConfig, Dataset, FileRows
from ops.datasets import load_dataset as load
from schemas import UserError

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(17)]


def load_dataset(spec: str, base: Path, *, shuffle: bool = True, seed: int = 0, held_out: bool = False) -> Dataset:
    return load(DataConfig(train=spec, shuffle=shuffle), base, seed=seed, held_out=held_out)


def jsonl(folder: Path, rows: list[Any]) -> str:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "data.jsonl"


def parquet(folder: Path, rows: list[Any]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    return "data.parquet"


def function(folder: Path, _: list[Any]) -> str:
    (folder / "task.py").write_text("def problem(rng): return {'prompt': f'{rng.random()}', 'answer': '5'}")
    return "task.py:problem"


@pytest.mark.parametrize("kind", [jsonl, parquet, function])
def test_any_draw_can_be_made_without_those_before_it(tmp_path: Path, kind: Any) -> None:
    """A controller that restarts goes on at the exact next draw; replay asks for any."""
    spec = kind(tmp_path, ROWS)
    in_order = load_dataset(spec, tmp_path, seed=3)
    expected = [in_order.row(k) for k in range(60)]
    numbers = list(range(60))
    Random(0).shuffle(numbers)
    at_random = load_dataset(spec, tmp_path, seed=3)
    assert {k: at_random.row(k) for k in numbers} == dict(enumerate(expected))
    assert load_dataset(spec, tmp_path, seed=4).row(0) != expected[0], "another seed, other draws"


@pytest.mark.parametrize("kind", [jsonl, parquet])
def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path: Path, kind: Any) -> None:
    """An epoch in the order of the last one would repeat the same batches."""
    data = load_dataset(kind(tmp_path, ROWS), tmp_path)
    epochs = [[data.row(k)["prompt"] for k in range(e * 17, e * 17 + 17)] for e in range(3)]
    assert all(sorted(epoch) == sorted(row["prompt"] for row in ROWS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffling_the_files_order_repeats(tmp_path: Path) -> None:
    """Curricula are files whose order matters."""
    data = load_dataset(jsonl(tmp_path, ROWS), tmp_path, shuffle=False)
    assert [data.row(k) for k in range(34)] == ROWS + ROWS


def test_held_out_draws_of_a_function_are_never_training_draws(tmp_path: Path) -> None:
    """Evaluation on what was trained on measures memory."""
    spec = function(tmp_path, [])
    train, held_out = (load_dataset(spec, tmp_path, held_out=held_out) for held_out in (False, True))
    seen = {train.row(k)["prompt"] for k in range(500)}
    assert not seen & {held_out.row(k)["prompt"] for k in range(500)}


def test_rows_may_hold_messages_and_whatever_the_reward_needs(tmp_path: Path) -> None:
    """Only the prompt has a fixed shape."""
    row = {"prompt": [{"role": "user", "content": "Hi"}], "tests": [{"in": 1, "out": [2, None]}], "answer": 3}
    assert load_dataset(jsonl(tmp_path, [row]), tmp_path).row(5) == row


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "2+3="}, "line 2: the row has no 'prompt', only question."),
        ([1], "line 2: the row is list, not a map."),
        ({"prompt": 5}, "line 2: the prompt is int, neither text nor a list of messages."),
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"prompt": [{"role": "user"}]}, "line 2: message 0 of the prompt has no 'content'."),
        ({"prompt": "a", "answer": 1 << 70}, "line 2: .*must be plain data"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_what_is_wrong(tmp_path: Path, row: Any, says: str) -> None:
    """At the start, not in the middle of the night when the row is drawn."""
    with pytest.raises(UserError, match=rf"data\.jsonl, {says}"):
        load_dataset(jsonl(tmp_path, [ROWS[0], row]), tmp_path)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    """A file cut short by a full disk ends in half an object."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"')
    with pytest.raises(UserError, match=r"data\.jsonl, line 3: the last line is cut short"):
        load_dataset("data.jsonl", tmp_path)


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    """A file saved in another encoding is the user's to mend; starting the controller again would not help."""
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"data\.jsonl, line 2: this is no UTF-8"):
        load_dataset("data.jsonl", tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path: Path) -> None:
    """Editors on Windows write both."""
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    data = load_dataset("data.jsonl", tmp_path, shuffle=False)
    assert [data.row(k)["prompt"] for k in range(2)] == ["a", "b"]


def test_a_bad_row_of_a_function_is_named_by_its_draw(tmp_path: Path) -> None:
    """The draw's number is what reproduces it."""
    (tmp_path / "task.py").write_text("def problem(rng): return {'answer': '5'}")
    with pytest.raises(UserError, match=r"'task\.py:problem', draw 7: the row has no 'prompt'"):
        load_dataset("task.py:problem", tmp_path).row(7)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("none.jsonl", r"The data file .*none\.jsonl does not exist"),
        ("empty.jsonl", r"empty\.jsonl has no rows"),
        ("broken.parquet", r"broken\.parquet cannot be read as Parquet"),
        ("data.csv", r"neither a folder, nor a file that ends with \.jsonl, .*, nor a function"),
        ("task.py:problem", r"there is no file .*task\.py"),
    ],
)
def test_data_that_cannot_be_had_is_an_error_with_a_remedy(tmp_path: Path, spec: str, says: str) -> None:
    """One sentence instead of a traceback."""
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=says) as caught:
        load_dataset(spec, tmp_path)
    assert caught.value.remedy


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is an optional extra."""
    (tmp_path / "data.parquet").write_text("")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"Reading .* needs the package pyarrow.*pip install 'rollstream\[parquet\]'"):
        load_dataset("data.parquet", tmp_path)


def test_a_look_at_the_first_rows_does_not_read_the_others(tmp_path: Path) -> None:
    """Checks before a run, and evaluation, would otherwise read all of a file of gigabytes."""
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "data.jsonl").write_text("\n".join(["no json", *lines[:3], "no json", *lines[3:]]))
    config = DataConfig(train="data.jsonl", on_bad_row="skip", bad_rows_max=0.0, shuffle=False)
    data = load(config, tmp_path, most=3)
    assert isinstance(data, FileRows)
    assert (len(data), data.report.bad_rows, [data.row(k) for k in range(3)]) == (3, 1, ROWS[:3])
    with pytest.raises(UserError, match="2 of 19 rows are bad"):
        load(config, tmp_path)
