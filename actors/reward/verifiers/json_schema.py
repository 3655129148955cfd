"""`json_schema`: the reply is JSON that keeps to a schema."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NoReturn

from actors.reward.program import find_block
from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import behind
from schemas.errors import UserError

_ABSENT = object()
_TRIES_MAX = 1000  # of brackets that may begin a value: each makes an error, which counts the lines before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where the JSON stands, and what it must keep to."""

    schema: dict[str, Any] | None = None
    """The schema of all rows; without it each row has its own, in `schema_key`."""
    schema_key: str = "schema"
    extract: Literal["whole", "fence", "object"] = "whole"
    """`fence`: the last fenced block that is marked as JSON, or else the last of all; `object`: the first text from a
    `{` or `[` on that is JSON."""
    after: str | None = None
    """Only what stands behind the last such mark counts, such as `</think>`; a reply without it has no JSON."""
    answer_key: str | None = None
    """An entry of the row that the value must be equal to, beside keeping to the schema."""


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function. Raises `UserError` if the package is not installed, or the schema is none."""
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise UserError(
            "The reward function 'json_schema' needs the package jsonschema, which is not installed.",
            "Run: pip install 'rollstream[json]'.",
        ) from error

    def validator(schema: Any) -> Any:
        kind = validator_for(schema)
        kind.check_schema(schema)
        return kind(schema, registry=Registry())  # which fetches nothing, whatever the schema refers to

    try:
        fixed = validator(options.schema) if options.schema is not None else None
    except SchemaError as error:
        message = f"The option schema of the reward function 'json_schema' is no schema: {error.message}."
        raise UserError(message, "Correct it.") from None

    def json_schema(response: str, task: Mapping[str, Any]) -> dict[str, float]:
        """1.0 if the reply is JSON, keeps to the schema, and equals the answer if one is asked for; else 0.0.

        Parts: `parsed` and `valid`, each 0 or 1.
        """
        if fixed is None and options.schema_key not in task:
            raise ValueError(f"the data row has no '{options.schema_key}' to check against")
        checker = fixed or validator(task[options.schema_key])
        if options.answer_key is not None and options.answer_key not in task:
            raise ValueError(f"the data row has no '{options.answer_key}' to compare with")
        said = behind(response, options.after)
        value = _ABSENT if said is None else found_json(said, options.extract)
        if value is _ABSENT:
            return {"reward": 0.0, "parsed": 0.0, "valid": 0.0}
        valid = _keeps_to(checker, value)
        right = valid and (options.answer_key is None or same(value, task[options.answer_key]))
        return {"reward": float(right), "parsed": 1.0, "valid": float(valid)}

    return json_schema


def _keeps_to(checker: Any, value: Any) -> bool:
    """Whether a value keeps to the schema. What is too large or too deep for the checker does not."""
    try:
        return bool(checker.is_valid(value))
    except OverflowError:
        return False
    except RecursionError:
        checker.is_valid(None)  # raises it again if the schema is at fault
        return False


def found_json(text: str, where: str) -> Any:
    """The JSON value in `text`, or `_ABSENT`. Strict: no NaN, nothing infinite, no name twice in one object."""
    if where == "fence":
        text = find_block(text, {"json"}) or ""
    decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_once)
    try:
        if where != "object":
            return decoder.decode(text)
        for begin in islice(re.finditer(r"[{\[]", text), _TRIES_MAX):
            try:
                return decoder.raw_decode(text, begin.start())[0]
            except ValueError:
                continue
    except (ValueError, RecursionError):
        pass
    return _ABSENT


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is no 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found
