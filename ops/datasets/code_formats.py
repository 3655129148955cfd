"""Programming problems with tests: APPS, TACO, LiveCodeBench, DeepCoder. Their tests become those of the reward `code`:

    {"stdin": "3 4\\n", "stdout": "7\\n"}                           a program's input and output
    {"function": "add", "args": [3, 4], "expected": 7}            a call, of a function or a method of class Solution

The prompt says which of them is wanted, and ends with the starter code if the row has any.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ops.datasets.bad_rows import BadRow
from ops.datasets.packed_tests import unpack_tests

Test = dict[str, Any]

_PROGRAM = (
    "Write a Python program that reads its input from standard input and writes its answer to standard output. "
    "Put it into one ```python block."
)
_FUNCTION = "Write it in Python, as the function `{name}`. Put all of your code into one ```python block."
_STARTER = "\n\nBegin with this code:\n\n```python\n{code}\n```"
_REMEDY = "Mend the row, or correct data.format."
_NO_TESTS = "Without tests an answer cannot be scored; leave the row out."


def apps(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """APPS and TACO: `question`, `input_output` as JSON text `{"inputs", "outputs", "fn_name"?}`, `starter_code`."""
    return _problem(row, "question", _paired(_json(row.get("input_output"), "input_output"), "input_output"))


def livecodebench(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """LiveCodeBench: `question_content`, public and private tests, the function's name in `metadata`.

    Private tests are JSON, or JSON that was pickled, compressed and put into base64; nothing is ever unpickled.
    """
    metadata = _json(row.get("metadata") or {}, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    cases = list(_cases(_json(row.get("public_test_cases") or [], "public_test_cases"), "public_test_cases"))
    private = row.get("private_test_cases") or []
    if isinstance(private, str) and not private.lstrip().startswith("["):
        private = unpack_tests(private)
    cases += _cases(_json(private, "private_test_cases"), "private_test_cases")
    return _problem(row, "question_content", [_typed(case, name) for case in cases])


def deepcoder(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """DeepCoder: `problem` and `tests` as JSON text, shaped as by TACO, PrimeIntellect, LiveCodeBench or Codeforces."""
    tests = _json(row.get("tests"), "tests")
    if isinstance(tests, Mapping):
        return _problem(row, "problem", _paired(tests, "tests"))
    cases = [_typed(case, None) for case in _cases(tests, "tests")]
    return _problem(row, "problem", _unwrapped(cases) if _wraps(tests) else cases)


def _problem(row: Mapping[str, Any], column: str, tests: list[Test]) -> tuple[str, dict[str, Any]]:
    question = row.get(column)
    if not isinstance(question, str) or not question.strip():
        raise BadRow(f"'{column}' is {'missing' if question is None else 'no text'}", _REMEDY)
    if not tests:
        raise BadRow("there are no tests", _NO_TESTS)
    names = sorted({test["function"] for test in tests if "function" in test})
    if len(names) > 1 or (names and any("stdin" in test for test in tests)):
        raise BadRow("some tests call another function than others, or none", _REMEDY)
    prompt = f"{question.strip()}\n\n{_FUNCTION.format(name=names[0]) if names else _PROGRAM}"
    starter = row.get("starter_code")
    if isinstance(starter, str) and starter.strip():
        prompt += _STARTER.format(code=starter.strip("\n").rstrip())
    return prompt, {"tests": tests}


def _json(value: Any, column: str) -> Any:
    """A column that is JSON text, or already what it says."""
    if not isinstance(value, str):
        if value is None:
            raise BadRow(f"'{column}' is missing", _REMEDY)
        return value
    if not value.strip():
        raise BadRow(f"'{column}' is empty", _NO_TESTS)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"'{column}' is no JSON: {error}", _REMEDY) from None


def _cases(value: Any, column: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(case, Mapping) for case in value):
        raise BadRow(f"'{column}' is no list of tests", _REMEDY)
    return value


def _paired(value: Any, column: str) -> list[Test]:
    """Tests of `{"inputs": [...], "outputs": [...], "fn_name"?: name}`."""
    if not isinstance(value, Mapping):
        raise BadRow(f"'{column}' is {type(value).__name__}, not a map of inputs and outputs", _REMEDY)
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadRow(f"'{column}' has no lists of inputs and outputs that are equally long", _REMEDY)
    name = value.get("fn_name")
    if name is None:
        return [{"stdin": _lines(i), "stdout": _lines(o)} for i, o in zip(inputs, outputs, strict=True)]
    return _unwrapped([_call(name, i, o) for i, o in zip(inputs, outputs, strict=True)])


def _typed(case: Mapping[str, Any], name: Any) -> Test:
    """One test of `{"input", "output", "testtype" or "type", ...}`; a call's arguments are lines of JSON or a list."""
    if "input" not in case or "output" not in case:
        raise BadRow("a test has no 'input' and 'output'", _REMEDY)
    given, wanted = case["input"], case["output"]
    kind = str(case.get("testtype") or case.get("type") or "stdin")
    if kind not in ("functional", "function_call"):
        return {"stdin": _lines(given), "stdout": _lines(wanted)}
    metadata = case.get("metadata")
    name = case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None) or name
    if isinstance(given, str):
        given = [_json(line, "input") for line in given.split("\n") if line.strip()]
        wanted = _json(wanted, "output")
    return _call(name, given, wanted)


def _call(name: Any, args: Any, expected: Any) -> Test:
    if not isinstance(name, str) or not name.isidentifier():
        raise BadRow(f"a test calls {name!r}, which is no function's name", _REMEDY)
    if not isinstance(args, list):
        raise BadRow(f"a test's arguments are {type(args).__name__}, not a list", _REMEDY)
    return {"function": name, "args": args, "expected": expected}


def _wraps(cases: Iterable[Any]) -> bool:
    return any(isinstance(case, Mapping) and case.get("type") == "function_call" for case in cases)


def _unwrapped(tests: list[Test]) -> list[Test]:
    """Results out of the list of one that APPS, TACO and PrimeIntellect put most of them into.

    Only if all results of the problem are such lists. A problem whose every result really is a list of one is misread.
    """
    results = [test.get("expected") for test in tests if "function" in test]
    if not results or not all(isinstance(result, list) and len(result) == 1 for result in results):
        return tests
    return [test | {"expected": test["expected"][0]} if "function" in test else test for test in tests]


def _lines(value: Any) -> str:
    """Text, with the ends of lines that a program expects; a list of lines joined."""
    if isinstance(value, list):
        return "\n".join(map(_lines, value))
    return value.replace("\r\n", "\n") if isinstance(value, str) else json.dumps(value)
