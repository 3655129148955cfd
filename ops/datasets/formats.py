"""The shapes of public data sets: what of a row is the prompt, and what the reward function needs to score an answer.

Each adapter takes a raw row and gives `(prompt, task)`; the prompt is text, or chat messages. Examples:

- `rows`: `{"prompt": "2+3=", "answer": "5"}`; all but the prompt is the task. `messages` may stand for `prompt`.
- `gsm8k`: `{"question": "Tom has ...", "answer": "2 + 3 = 5 ...\\n#### 5"}`; the task is `{"answer": "5"}`.
- `math`: `{"problem": "Find $x$ ...", "solution": "... so $\\\\boxed{\\\\pi}$"}`; the task is `{"answer": "\\\\pi"}`.
- `choice` (MMLU, ARC, MMLU-Pro): `{"question": ..., "choices": [...], "answer": 2}`; the task's answer is `"C"`.
- `apps`, `taco`, `livecodebench`, `deepcoder`: problems with tests; see `ops.datasets.code_formats`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from string import ascii_uppercase
from typing import Any

from ops.datasets.bad_rows import BadRow
from ops.datasets.code_formats import apps, deepcoder, livecodebench

RawRow = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]
Task = dict[str, Any]

_BOXED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


@dataclasses.dataclass(frozen=True)
class Format:
    """A shape of rows. `columns` must be there; `rewards` are the built-in functions that score its task."""

    name: str
    columns: tuple[str, ...]
    adapt: Callable[[RawRow], tuple[Prompt, Task]]
    rewards: tuple[str, ...]


def rows(row: RawRow) -> tuple[Prompt, Task]:
    """Our own shape."""
    task = dict(row)
    if "prompt" in row:
        return task.pop("prompt"), task
    messages = task.pop("messages")
    if not isinstance(messages, list):
        raise BadRow(f"'messages' is {type(messages).__name__}, not a list", "It is a list of {'role', 'content'}.")
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages = messages[:-1]  # the answer of a demonstration
    return messages, task


def gsm8k(row: RawRow) -> tuple[Prompt, Task]:
    """The number behind the last `####`, without thousands separators and currency."""
    question, solution = text(row, "question"), text(row, "answer")
    _, mark, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "").lstrip("$").strip()
    if not mark or not answer:
        raise BadRow("'answer' does not end with '#### number'", "A GSM8K answer ends so; see data.format.")
    return question, {"answer": answer}


def math(row: RawRow) -> tuple[Prompt, Task]:
    """The column `answer` if there is one, else what stands in the solution's last `\\boxed{...}`."""
    problem = text(row, "problem")
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        answer = last_boxed(text(row, "solution"))
    if not isinstance(answer, str):
        raise BadRow("'solution' has no \\boxed{...} and there is no 'answer'", "One of them must hold the answer.")
    kept = {key: row[key] for key in ("level", "type", "subject") if isinstance(row.get(key), str | int)}
    return problem, {"answer": answer.strip(), **kept}


def choice(row: RawRow) -> tuple[Prompt, Task]:
    """Choices with letters under the question; the task's answer is the letter, `choices` all texts in order."""
    question = text(row, "question")
    given: Any = row.get("choices", row.get("options"))
    labels: Any = None
    if isinstance(given, dict):  # ARC: {"text": [...], "label": ["A", ...]}
        given, labels = given.get("text"), given.get("label")
    if not isinstance(given, list) or not 2 <= len(given) <= len(ascii_uppercase):
        raise BadRow("'choices' is no list of 2 to 26 texts", "MMLU rows have one; see data.format.")
    choices = [str(item) for item in given]
    letters = ascii_uppercase[: len(choices)]
    answer = row.get("answerKey", row.get("answer"))
    at: int | None = None
    if isinstance(answer, int) and not isinstance(answer, bool):
        at = answer
    elif isinstance(answer, str):
        names = [str(label) for label in labels] if isinstance(labels, list) else list(letters)
        wanted = answer.strip()
        at = names.index(wanted) if wanted in names else choices.index(wanted) if wanted in choices else None
    if at is None or not 0 <= at < len(choices):
        raise BadRow(f"the answer {answer!r} is none of the {len(choices)} choices", "It is a letter or an index.")
    listed = "\n".join(f"{letter}. {item}" for letter, item in zip(letters, choices, strict=True))
    return f"{question}\n\n{listed}", {"answer": letters[at], "choices": choices}


def last_boxed(solution: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, braces balanced, or behind `\boxed 5`; None if there is none."""
    last = None
    for last in _BOXED.finditer(solution):  # noqa: B007  # the last one is wanted
        pass
    if last is None:
        return None
    rest = solution[last.end() :]
    if not rest.startswith("{"):
        bare = re.match(r"[^\s$.,;]+", rest)
        return bare.group() if bare else None
    depth = 0
    for at, char in enumerate(rest):
        if char in "{}" and (at == 0 or rest[at - 1] != "\\"):
            depth += 1 if char == "{" else -1
            if depth == 0:
                return rest[1:at].strip() or None
    return None


def text(row: RawRow, column: str) -> str:
    """A column that is text and not blank. Raises `BadRow`."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        what = "missing" if value is None else "empty" if value in ("", []) or isinstance(value, str) else None
        raise BadRow(
            f"'{column}' is {what or type(value).__name__}" + ("" if what else ", not text"),
            "Mend the row, or correct data.format and data.columns.",
        )
    return value


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("rows", ("prompt",), rows, ()),
        Format("gsm8k", ("question", "answer"), gsm8k, ("numeric", "math_verify", "exact")),
        Format("math", ("problem", "solution"), math, ("math_verify",)),
        Format("choice", ("question", "choices"), choice, ("choice", "exact")),
        Format("apps", ("question", "input_output"), apps, ("code",)),
        Format("taco", ("question", "input_output"), apps, ("code",)),
        Format("livecodebench", ("question_content", "public_test_cases"), livecodebench, ("code",)),
        Format("deepcoder", ("problem", "tests"), deepcoder, ("code",)),
    )
}


def format_of(row: Any) -> Format | None:
    """The format that a row has the columns of, None if it looks like none of them."""
    if not isinstance(row, Mapping):
        return None
    has = set(row)
    if "prompt" in has or "messages" in has:
        return FORMATS["rows"]
    for name in ("livecodebench", "deepcoder", "apps"):
        if has.issuperset(FORMATS[name].columns):
            return FORMATS[name]
    if "question" in has and has & {"choices", "options"} and has & {"answer", "answerKey"}:
        return FORMATS["choice"]
    if "problem" in has and has & {"solution", "answer"}:
        return FORMATS["math"]
    if has.issuperset({"question", "answer"}) and "####" in str(row["answer"]):
        return FORMATS["gsm8k"]
    return None


def known(names: Iterable[str]) -> str:
    """Column names in words."""
    return ", ".join(map(str, names)) or "nothing"


def brief(value: Any) -> str:
    """A value in an error, cut."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
