"""The options of the built-in functions, and those that need some: a reading that is too kind rewards wrong answers."""

import sys
import time
from typing import Any

import pytest

from actors.reward.verifiers import RewardFunction, Setting, load_builtin
from actors.reward.verifiers.extract import extract
from actors.reward.verifiers.judge import Options as JudgeOptions
from actors.reward.verifiers.judge import score_in
from schemas import UserError


def built_in(name: str, **options: Any) -> RewardFunction:
    return load_builtin(name, options, Setting())


@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{a} \\boxed{never closed", "boxed", "a"),
        ("\\boxed{\\boxed{7}}", "boxed", "7"),
        ("\\fbox \\fboxed{3}", "boxed", "3"),
        ("5", "boxed", None),
        ("so \\boxed 5.", "boxed", "5"),
        ("\\fbox{6}", "boxed", "6"),
        ("\\boxed{1} \\boxed 5", "boxed", "5"),
        ("48/2 = 24\n#### 72", "hashes", "72"),
        ("#### 1\n#### 2\nmore", "hashes", "2"),
        ("72", "hashes", None),
        ("a <answer>1</answer> b <answer> 2 </answer> c", "tag", "2"),
        ("<answer>1", "tag", None),
        ("a 1 b 2/3.", "last_number", "2/3"),
        ("none", "last_number", None),
        ("a\n b \n\n", "last_line", "b"),
        ("", "last_line", None),
    ],
)
def test_the_final_answer_is_found_where_the_option_says(text: str, where: Any, found: str | None) -> None:
    assert extract(text, where) == found


@pytest.mark.parametrize(
    ("name", "options", "right", "row"),
    [
        ("numeric", {}, "the answer is 8", {"answer": "8"}),
        ("exact", {}, "8", {"answer": "8"}),
        ("choice", {}, "(B)", {"answer": "B"}),
        ("json_schema", {}, "{}", {"schema": {"type": "object"}}),
        ("regex", {"pattern": "8"}, "8", {}),
    ],
)
def test_only_what_stands_behind_a_mark_counts(name: str, options: dict[str, Any], right: str, row: Any) -> None:
    """What was thought is no answer, least of all where the reply was cut before there was one."""

    def score(response: str) -> float:
        given = built_in(name, after="</think>", **options)(response, row)
        return float(given["reward"] if isinstance(given, dict) else given)

    assert score(f"<think>it is {right}?</think>{right}") == 1.0
    assert score(f"<think>it is {right}?</think>no") == 0.0
    assert score(f"<think>it is {right}") == 0.0
    assert score(right) == 0.0


@pytest.mark.parametrize("unit", ["\\boxed ", "\\boxed{", "}", "<answer>", "####", "{", "\\boxed{}"])
@pytest.mark.parametrize("where", ["boxed", "tag", "hashes"])
def test_extraction_takes_time_linear_in_the_reply(unit: str, where: Any) -> None:
    """Replies are written by a model; one of repeated marks must not stall a worker."""
    extract(unit * 100_000, where)


def test_a_row_is_read_where_its_dataset_keeps_the_answer() -> None:
    """A GSM8K row is its own solution, and an answer that is not where it should be is a fault of the data."""
    reward = built_in("numeric", extract="hashes", extract_answer="hashes", answer_key="solution")
    assert reward("...\n#### 72", {"solution": "48+24\n#### 72"}) == 1.0
    assert reward("72", {"solution": "48+24\n#### 72"}) == 0.0
    with pytest.raises(ValueError, match="has nothing at 'hashes'"):
        reward("#### 72", {"solution": "72"})


@pytest.mark.parametrize(
    ("options", "response", "answer", "reward"),
    [
        ({"ignore_case": True}, "YES", "yes", 1.0),
        ({"ignore_space": True}, "a \n b", "a b", 1.0),
        ({}, "a  b", "a b", 0.0),
    ],
)
def test_exact_forgives_what_it_is_told_to(options: dict[str, Any], response: str, answer: str, reward: float) -> None:
    assert built_in("exact", **options)(response, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("options", "response", "answer", "reward"),
    [
        ({"tolerance_absolute": 0.5}, "12.5", 12, 1.0),
        ({"tolerance_absolute": 0.5}, "12.51", 12, 0.0),
        ({"tolerance_relative": 0.01}, "101", 100, 1.0),
        ({"tolerance_relative": 0.01}, "102", 100, 0.0),
        ({"tolerance_relative": 0.01, "tolerance_absolute": 5}, "104", 100, 1.0),
        ({"percent": "scale"}, "50 %", 0.5, 1.0),
        ({"percent": "scale"}, "50\\%", "50%", 1.0),
        ({"percent": "scale"}, "50", 0.5, 0.0),
        ({"units": {"km": 1000, "m": 1}}, "it is 1.5 km", "1500 m", 1.0),
        ({"units": {"km": 1000, "m": 1}}, "it is 1500 apples", "1500", 1.0),
        ({"units": {"km": 1000, "m": 1}}, "1500 km", "1500 m", 0.0),
        ({"decimal_comma": True}, "1.234,5", "1.234,5", 1.0),
        ({"decimal_comma": True}, "1234,5", "1.234,5", 1.0),
    ],
)
def test_numeric_reads_what_it_is_told_to(options: dict[str, Any], response: str, answer: Any, reward: float) -> None:
    assert built_in("numeric", **options)(response, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("B", 1.0),
        ("(B)", 1.0),
        ("b.", 1.0),
        ("**B**", 1.0),
        ("The answer is (B).", 1.0),
        ("The correct answer is: **B**", 1.0),
        ("answer: b", 1.0),
        ("Not A or C, so $\\boxed{\\text{B}}$", 1.0),
        ("\\boxed{B}", 1.0),
        ("First I thought the answer is A. The answer is B.", 1.0),
        ("(A) is wrong. (B) is right", 1.0),
        ("A is wrong, and so I choose B", 1.0),
        ("The answer is A, not B.", 0.0),
        ("The answer is because of gravity", 0.0),
        ("Bananas", 0.0),
        ("A banana is a berry.", 0.0),
        ("The answer is a matter of taste: (B)", 1.0),
        ("The answer is a bit tricky.", 0.0),
        ("Answer: I think it is (B)", 1.0),
        ("The answer is B because it floats", 1.0),
        ("The answer is therefore B", 1.0),
        ("The answer is B. Option A is wrong.", 1.0),
        ("Option A was tempting. The answer is B.", 1.0),
        ("Option B is the correct answer", 1.0),
        ("The answer is option B", 1.0),
        ("$\\boxed{\\mathrm{B}}$", 1.0),
        ("\\boxed{\\textbf{(B)}}", 1.0),
        ("", 0.0),
        ("C", 0.0),
    ],
)
def test_choice_takes_the_letter_that_a_reply_settles_on(response: str, reward: float) -> None:
    assert built_in("choice")(response, {"answer": "B"}) == reward


@pytest.mark.parametrize(
    ("options", "task"),
    [
        ({"answer_is": "index"}, {"answer": 1}),
        ({"answer_is": "text"}, {"answer": "blue", "choices": ["red", "blue"]}),
        ({}, {"answer": "(b)"}),
    ],
)
def test_choice_reads_the_rows_answer_as_it_is_told(options: dict[str, Any], task: dict[str, Any]) -> None:
    assert built_in("choice", **options)("B", task) == 1.0


@pytest.mark.parametrize(
    ("options", "task"),
    [
        ({}, {"answer": "blue"}),
        ({"answer_is": "index"}, {"answer": 99}),
        ({"answer_is": "text"}, {"answer": "blue", "choices": ["red"]}),
        ({"answer_is": "text"}, {"answer": "blue"}),
    ],
)
def test_a_choice_that_the_row_does_not_have_is_an_error_and_no_zero(
    options: dict[str, Any], task: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="answer"):
        built_in("choice", **options)("B", task)


def test_choice_takes_time_linear_in_the_reply() -> None:
    for unit in ("(A", "answer is ", "**", "A.\n", "*" * 50 + "answer", " "):
        built_in("choice")(unit * 20_000, {"answer": "B"})


@pytest.mark.parametrize(
    ("options", "response", "reward"),
    [
        ({"pattern": r"^\d+$"}, "12", 1.0),
        ({"pattern": r"\d+", "match": "full"}, "12a", 0.0),
        ({"pattern": "total: {answer}"}, "total: 1.5", 1.0),
        ({"pattern": "total: {answer}"}, "total: 1x5", 0.0),
        ({"pattern": r"= (\S+)", "group": "1"}, "a = 1 b = 1.5", 1.0),
        ({"pattern": r"= (\S+)", "group": "1"}, "a = 1.5 b = 1", 0.0),
        ({"pattern": "(?P<n>X)", "group": "n", "ignore_case": True}, "x", 0.0),
        ({"pattern": "a.b", "dotall": True}, "a\nb", 1.0),
        ({"pattern": "^b$", "multiline": True}, "a\nb", 1.0),
    ],
)
def test_regex_matches_the_reply(options: dict[str, Any], response: str, reward: float) -> None:
    assert built_in("regex", **options)(response, {"answer": "1.5"}) == reward


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option pattern. Add reward.options.pattern, text."),
        ({"pattern": "("}, "is none: missing )"),
        ({"pattern": "a", "group": "1"}, "has no group 1"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        built_in("regex", **options)
    assert says in str(caught.value)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("options", "response", "reward", "parsed", "valid"),
    [
        ({}, '{"n": 5}', 1, 1, 1),
        ({}, '{"n": "5"}', 0, 1, 0),
        ({}, 'so: {"n": 5}', 0, 0, 0),
        ({}, '{"n": 5, "n": 6}', 0, 0, 0),
        ({}, '{"n": NaN}', 0, 0, 0),
        ({}, "[" * 100_000, 0, 0, 0),
        ({"extract": "object"}, 'so {x} {"n": 5} then', 1, 1, 1),
        ({"extract": "fence"}, 'a\n```json\n{"n": 5}\n```\n', 1, 1, 1),
        ({"extract": "fence"}, '{"n": 5}', 0, 0, 0),
        ({"extract": "fence"}, '```python\nx\n```\n```json\n{"n": 5}\n```\n```\noutput\n```', 1, 1, 1),
        ({"extract": "fence"}, '~~~JSON\r\n{"n": 5}\r\n~~~', 1, 1, 1),
        ({"extract": "fence"}, '```json\n{"n": 5}', 0, 0, 0),
        ({"answer_key": "answer"}, '{"n": 5}', 1, 1, 1),
        ({"answer_key": "answer"}, '{"n": 6}', 0, 1, 1),
    ],
)
def test_json_schema_tells_parsed_from_valid_from_right(
    options: dict[str, Any], response: str, reward: float, parsed: float, valid: float
) -> None:
    verdict = built_in("json_schema", schema=SCHEMA, **options)(response, {"answer": {"n": 5}})
    assert verdict == {"reward": reward, "parsed": parsed, "valid": valid}


@pytest.mark.parametrize("unit", ["{", "{ ", '{"', "[", "[ ", "[1", "]", '{"a":'])
def test_looking_for_json_takes_little_time(unit: str) -> None:
    """Each bracket that is tried makes an error, which counts the lines of all that is before it."""
    began = time.process_time()
    built_in("json_schema", schema=SCHEMA, extract="object")(unit * 50_000, {})
    score_in(unit * 50_000, JudgeOptions(url="http://judge", model="m", parse="json"))
    assert time.process_time() - began < 2


def test_each_row_may_have_a_schema_of_its_own() -> None:
    reward = built_in("json_schema")
    assert reward("5", {"schema": {"type": "integer"}})["reward"] == 1.0
    with pytest.raises(ValueError, match="has no 'schema'"):
        reward("5", {})


def test_true_is_no_one() -> None:
    reward = built_in("json_schema", schema={}, answer_key="answer")
    assert reward("true", {"answer": 1})["reward"] == 0.0
    assert reward("[1.0]", {"answer": [1]})["reward"] == 1.0


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="is no schema"):
        built_in("json_schema", schema={"type": "nothing"})


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("json_schema", "jsonschema", "json"), ("math_verify", "math_verify", "math")]
)
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"which is not installed.*pip install 'rollstream\[{extra}\]'"):
        built_in(name)


@pytest.mark.parametrize(
    "reply",
    ['{"n": 1e400}', f'{{"n": {"9" * 4000}}}', '{"n": ' + "[" * 300 + "]" * 300 + "}"],
    ids=["inf", "int", "deep"],
)
def test_a_reply_that_is_too_much_for_the_checker_is_not_valid(reply: str) -> None:
    """It raised, so that the sample was dropped: a way for the model out of its 0."""
    deep = {"properties": {"n": {"$ref": "#/$defs/deep"}}}
    schema = deep | {"$defs": {"deep": {"multipleOf": 0.01, "items": {"$ref": "#/$defs/deep"}}}}
    assert built_in("json_schema", schema=schema)(reply, {})["reward"] == 0.0  # type: ignore[index]
    assert built_in("json_schema", schema=schema)('{"n": [0.5, 2]}', {})["reward"] == 1.0  # type: ignore[index]


def test_a_schema_without_an_end_is_nobodys_0() -> None:
    with pytest.raises(RecursionError):
        built_in("json_schema", schema={"$ref": "#"})("[" * 300 + "]" * 300, {})
