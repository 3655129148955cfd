"""Public data sets load as published: invented problems in their exact shapes load, and score right and wrong."""

import base64
import contextlib
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.reward.code import Options, load
from actors.reward.verifiers import RewardFunction, Setting, load_builtin
from ops.datasets import BadRow, DataConfig, load_dataset
from ops.datasets.formats import FORMATS, last_boxed
from ops.datasets.rewards import check_reward
from schemas import UserError

PUBLIC = Path(__file__).parent / "public_rows"
FORMAT_OF = {
    "gsm8k": "gsm8k",
    "math": "math",
    "math500": "math",
    "mmlu": "choice",
    "arc": "choice",
    "mmlu_pro": "choice",
    "apps": "apps",
    "taco": "apps",
    "livecodebench": "livecodebench",
    "deepcoder": "deepcoder",
}


def rows_of(name: str, **config: Any) -> list[dict[str, Any]]:
    data = load_dataset(DataConfig(train=f"{name}.jsonl", shuffle=False, **config), PUBLIC)
    assert data.format == FORMAT_OF[name] or config.get("format") == data.format
    return [data.row(k) for k in range(len(data))]  # type: ignore[arg-type]  # of a file


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("gsm8k", ["37", "5000", "-3"]),
        ("math", [r"\frac{1}{3}", r"2\sqrt{2}"]),
        ("math500", ["(1,4]"]),
        ("mmlu", ["B", "C"]),
        ("arc", ["A", "C"]),
        ("mmlu_pro", ["F"]),
    ],
)
def test_the_answer_is_found_in_each_shape(name: str, answers: list[str]) -> None:
    """Commas, boxes within boxes, letters, labels and indices: each data set has its own way."""
    assert [row["answer"] for row in rows_of(name)] == answers


@pytest.mark.parametrize(
    ("name", "function", "number", "right", "wrong"),
    [
        ("gsm8k", "numeric", 0, "6 rows of 7 are 42, less 5 is 37", "That makes 42."),
        ("gsm8k", "numeric", 1, "5,000 kg", "1,250"),
        ("gsm8k", "numeric", 2, "It says -3", "It says 3"),
        ("gsm8k", "math_verify", 1, r"\boxed{5000}", r"\boxed{500}"),
        ("math", "math_verify", 0, r"So it is $\frac{2}{6}$.", r"So it is $\frac{2}{3}$."),
        ("math", "math_verify", 1, r"$\boxed{\sqrt{8}}$", r"$\boxed{2}$"),
        ("math500", "math_verify", 0, r"$(1,4]$", r"$[1,4]$"),
        ("mmlu", "choice", 0, "The answer is B.", "The answer is C."),
        ("arc", "choice", 1, "(C)", "(A)"),
        ("mmlu_pro", "choice", 0, "F", "E"),
        ("mmlu", "exact", 1, "C", "c"),
    ],
)
def test_right_answers_score_and_wrong_ones_do_not(
    name: str, function: str, number: int, right: str, wrong: str
) -> None:
    """A task that the reward function cannot use gives errors all night, and no reward."""
    row = rows_of(name)[number]
    reward = load_builtin(function, {}, Setting())
    assert (reward(response=right, task=row), reward(response=wrong, task=row)) == (1.0, 0.0)
    assert function in FORMATS[FORMAT_OF[name]].rewards
    check_reward(function, row, FORMAT_OF[name])


@pytest.fixture(scope="module")
def code() -> Iterator[RewardFunction]:
    if shutil.which("bwrap") is None and "CI" not in os.environ:
        pytest.skip("without bubblewrap no program is run")
    with contextlib.closing(load(Options(), Setting())) as reward:
        yield reward


PROGRAMS = [
    ("apps", 0, "a, b = map(int, input().split())\nprint(a + b)", "print(5)"),
    (
        "apps",
        1,
        "def keep_positive(numbers):\n    return [n for n in numbers if n > 0]",
        "def keep_positive(n): return n",
    ),
    ("taco", 0, "print(max((input() for _ in range(int(input()))), key=len))", "print('ab')"),
    ("livecodebench", 0, "print(2 * int(input()))", "print(8)"),
    (
        "livecodebench",
        1,
        "class Solution:\n    def together(self, words, separator):\n        return separator.join(words)",
        "class Solution:\n    def together(self, words, separator):\n        return words",
    ),
    ("deepcoder", 0, "print(max(map(int, input().split())))", "print(input().split()[0])"),
    ("deepcoder", 1, "def product(a, b): return a * b", "def product(a, b): return [a * b]"),
    ("deepcoder", 2, "for i in range(int(input())): print(i + 1)", "print(1, 2)"),
    (
        "deepcoder",
        3,
        "class Solution:\n    def mirrored(self, word):\n        return word == word[::-1]",
        "class Solution:\n    def mirrored(self, word):\n        return True",
    ),
]


def test_programs_pass_the_tests_of_public_rows_or_fail_them(code: RewardFunction) -> None:
    """Rows, tests and sandbox agree on what a test is: stdin and stdout, and calls, of functions and of methods."""
    scores = [
        tuple(code(response=f"```python\n{text}\n```", task=rows_of(name)[number])["reward"] for text in (right, wrong))
        for name, number, right, wrong in PROGRAMS
    ]
    assert scores == [(1.0, 0.0)] * len(PROGRAMS)


def test_the_prompt_says_what_program_is_wanted(tmp_path: Path) -> None:
    """The row's text alone does not tell whether to read stdin or to write a function."""
    program, method = rows_of("livecodebench")
    assert "standard input" in program["prompt"]
    assert "`together`" in method["prompt"]
    assert method["prompt"].endswith("def together(self, words: List[str], separator: str) -> str:\n```")
    assert "solutions" not in rows_of("apps")[0], "the answer has no business in the row"


def test_letters_stand_under_the_question() -> None:
    """They are what the model is to answer with."""
    assert rows_of("mmlu")[1]["prompt"] == "How many sides has a hexagon?\n\nA. four\nB. five\nC. six\nD. seven"


def packed(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


CASES = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
LCB = {"question_content": "Add one.", "public_test_cases": "[]", "private_test_cases": packed(CASES), "metadata": "{}"}


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_packed_tests_of_every_pickle_protocol_are_read(protocol: int) -> None:
    """Which one depends on the Python that packed them."""
    _, task = FORMATS["livecodebench"].adapt(LCB | {"private_test_cases": packed(CASES, protocol)})
    assert task == {"tests": [{"stdin": "1", "stdout": "2"}]}


@pytest.mark.parametrize(
    ("private", "says"),
    [
        (packed(Trap()), "does more than hold a text"),
        (packed([CASES]), "does more than hold a text"),
        (packed(b"bytes"), "does more than hold a text"),
        (base64.b64encode(zlib.compress(pickle.dumps(CASES)[:-1])).decode(), "pickle"),
        (base64.b64encode(zlib.compress(pickle.dumps(CASES))[:-9]).decode(), "cut short"),
        (base64.b64encode(b"no zlib").decode(), "cannot be unpacked"),
        ("%%%", "cannot be unpacked"),
        (packed("no json"), "is no JSON"),
        (packed(json.dumps({"a": 1})), "is no list of tests"),
    ],
)
def test_a_pickle_is_read_and_never_run(
    private: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes a data file must not run code on the machine that trains."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRow, match=says):
        FORMATS["livecodebench"].adapt(LCB | {"private_test_cases": private})
    assert not (tmp_path / "trapped").exists()


def test_a_packed_file_that_swells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes may unpack to more than there is memory."""
    monkeypatch.setattr("ops.datasets.packed_tests.UNPACKED_BYTES_MAX", 1000)
    with pytest.raises(BadRow, match="unpacks to more than 1,000 bytes"):
        FORMATS["livecodebench"].adapt(LCB | {"private_test_cases": packed("x" * 2000)})


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gsm8k", {"answer": "It is 37."}, "'answer' does not end with '#### number'"),
        ("gsm8k", {"question": None}, "'question' is missing"),
        ("math", {"solution": "Obviously."}, r"has no \\boxed"),
        ("mmlu", {"answer": 4}, "the answer 4 is none of the 4 choices"),
        ("mmlu", {"choices": ["one"]}, "no list of 2 to 26"),
        ("apps", {"input_output": ""}, "'input_output' is empty"),
        ("apps", {"input_output": '{"inputs": [], "outputs": []}'}, "there are no tests"),
        ("apps", {"input_output": '{"inputs": ["1"], "outputs": []}'}, "equally long"),
        ("apps", {"input_output": '{"inputs": [1'}, "'input_output' is no JSON"),
        ("livecodebench", {"public_test_cases": '[{"input": "1"}]'}, "a test has no 'input' and 'output'"),
        ("livecodebench", {"question_content": " "}, "'question_content' is no text"),
        (
            "deepcoder",
            {"tests": '[{"type": "function_call", "input": [1], "output": 2}]'},
            "which is no function's name",
        ),
    ],
)
def test_a_row_that_lacks_something_is_named_with_what(
    name: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Of 10,000 public rows a few always lack something."""
    first = json.loads((PUBLIC / f"{name}.jsonl").read_text().splitlines()[0])
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(first | change)}\n")
    config = DataConfig(train="rows.jsonl", format=FORMAT_OF[name])  # type: ignore[arg-type]
    with pytest.raises(BadRow, match=rf"rows\.jsonl, line 2: .*{says}"):
        load_dataset(config, tmp_path)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", FORMAT_OF)
@settings(max_examples=60)
@given(data=st.data())
def test_an_adapter_fails_only_by_saying_what_is_wrong(name: str, data: st.DataObject) -> None:
    """Its own traceback would stop a run at a row that should be skipped."""
    row = dict(
        data.draw(st.sampled_from([json.loads(line) for line in (PUBLIC / f"{name}.jsonl").read_text().splitlines()]))
    )
    value = plain | plain.map(json.dumps) | st.just(packed(CASES)) | st.lists(plain.map(json.dumps), max_size=2)
    for column in data.draw(st.lists(st.sampled_from(list(row)), min_size=1, max_size=3)):
        row[column] = data.draw(value)
    with contextlib.suppress(BadRow):
        prompt, task = FORMATS[FORMAT_OF[name]].adapt(row)
        assert isinstance(prompt, str)
        assert task.get("answer") or task["tests"]


@given(st.text(alphabet="ab{}\\ ", max_size=12))
def test_a_box_holds_what_its_braces_hold(inside: str) -> None:
    """Answers hold braces of their own; a naive count over the whole text is the oracle."""
    depth, end = 0, None
    text = "{" + inside + "}"
    for at, char in enumerate(text):
        escaped = at > 0 and text[at - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(char, 0)
        if depth == 0 and not escaped:
            end = at
            break
    expected = None if end is None else text[1:end].strip() or None
    assert last_boxed(rf"first \boxed{{1}}, then \boxed{text}") == expected


def test_tests_beyond_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    """They travel with every sample: public rows hold megabytes of them."""
    cases = [{"input": "x" * size, "output": "y", "testtype": "stdin"} for size in (100, 5000, 100, 100)]
    (tmp_path / "rows.jsonl").write_text(json.dumps(LCB | {"private_test_cases": packed(json.dumps(cases))}))
    data = load_dataset(DataConfig(train="rows.jsonl", tests_bytes_max=400), tmp_path)
    assert [len(test["stdin"]) for test in data.row(0)["tests"]] == [100, 100, 100]
    assert data.report.tests_left_out == 1  # type: ignore[attr-defined]
    many = [{"input": "1", "output": "2", "testtype": "stdin"}] * 1500
    (tmp_path / "many.jsonl").write_text(json.dumps(LCB | {"private_test_cases": packed(json.dumps(many))}))
    assert len(load_dataset(DataConfig(train="many.jsonl"), tmp_path).row(0)["tests"]) == 1000, "what code takes"
    with pytest.raises(UserError, match="none of its 4 tests fits into 10 bytes"):
        load_dataset(DataConfig(train="rows.jsonl", tests_bytes_max=10), tmp_path)


def test_inputs_of_windows_have_the_lines_that_programs_expect() -> None:
    """`input()` leaves the carriage return on, so a right program failed where the input was text."""
    row = {"question": "q", "input_output": json.dumps({"inputs": ["a\r\nb\r\n"], "outputs": ["ab\r\n"]})}
    assert FORMATS["apps"].adapt(row)[1]["tests"] == [{"stdin": "a\nb\n", "stdout": "ab\n"}]


def test_tests_that_no_message_can_hold_are_left_out_and_the_row_is_kept(tmp_path: Path) -> None:
    """One call with a long list made the whole problem a bad row, and stopped the run."""
    good = {"function": "f", "args": [[1, 2]], "expected": 3}
    large = [{"args": [[1] * 5000]}, {"args": [2**70]}, {"expected": 2**70}, {"args": [[[[[[[[[1]]]]]]]]]}]
    tests = [*(good | bad for bad in large), good]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "f?", "tests": tests}))
    data = load_dataset(DataConfig(train="rows.jsonl"), tmp_path)
    assert data.row(0)["tests"] == [good]
    assert data.report.tests_left_out == 4  # type: ignore[attr-defined]
    (tmp_path / "none.jsonl").write_text(json.dumps({"prompt": "f?", "tests": tests[:1]}))
    with pytest.raises(UserError, match="plain data"):
        load_dataset(DataConfig(train="none.jsonl"), tmp_path)


def test_a_reward_that_can_only_fail_on_the_rows_is_told_with_one_that_fits() -> None:
    """`exact` is the default, and compares with an answer that code problems do not have."""
    with pytest.raises(UserError, match="no 'answer', but tests") as told:
        check_reward("exact", rows_of("apps")[0], "apps")
    assert told.value.remedy == "Set reward.function to code."
    with pytest.raises(UserError, match="have no tests") as told:
        check_reward("code", rows_of("gsm8k")[0], "gsm8k")
    assert told.value.remedy == "Set reward.function to numeric."
