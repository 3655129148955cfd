"""`composite`: a weighted sum of several functions, some of which may be gates.

```
options:
  parts:
    - {function: regex, options: {pattern: "#### -?\\d+$"}, name: format, weight: 0.1, gate: true}
    - {function: numeric, options: {extract: hashes}, weight: 1.0}
    - {function: judge, options: {...}, weight: 0.5}
```
Parts are asked in this order. A gate that gives 0 or less makes the whole 0, and the parts behind it are not asked.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from math import isfinite
from typing import Any

from actors.reward.read import PARTS_MAX, read_reward
from actors.reward.steps import PROCESS_REWARDS, check_steps, read_float32, read_process_rewards
from actors.reward.verifiers import BUILTINS, RewardFunction, Setting, check_options
from actors.reward.verifiers.options import as_reason, read_options
from schemas.errors import UserError

TAKEN = ("reward", "detail", *PROCESS_REWARDS)  # what else the returned map holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the functions."""

    function: str
    options: dict[str, Any] | None = None
    name: str | None = None
    """Its name among the parts of the verdict; the function's without path by default."""
    weight: float = 1.0
    """What its reward is multiplied with in the sum; 0 only logs it."""
    gate: bool = False
    """Whether 0 or less of it makes the whole 0 and spares the parts behind it."""

    def __post_init__(self) -> None:
        if not isfinite(self.weight):
            raise ValueError(f"weight is {self.weight} => It must be a finite number.")

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or self.function.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The functions, in the order in which they are asked: cheap ones and gates first."""

    parts: tuple[dict[str, Any], ...]

    def __post_init__(self) -> None:
        labels = [part.label for part in self.read()]
        if not labels:
            raise ValueError("parts is empty => Name at least one function.")
        for label in labels:
            if labels.count(label) > 1 or label in TAKEN:
                raise ValueError(f"the name {label} of a part is taken => Give each a name of its own.")

    def read(self) -> list[Part]:
        """The parts. Raises `ValueError` for what does not fit, the options of built-in functions included."""
        try:
            parts = [read_options(Part, given, f"composite.parts[{i}]") for i, given in enumerate(self.parts)]
            for part in parts:
                if part.function in BUILTINS:
                    check_options(part.function, part.options or {})
        except UserError as error:
            raise ValueError(as_reason(error)) from None
        return parts


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function. Raises `UserError` if a part cannot be loaded."""
    from actors.reward.load import KEYWORDS, load

    parts = [(part, *load(part.function, part.options or {}, setting)) for part in options.read()]
    wanted = {keyword for _, _, keywords in parts for keyword in keywords}

    def composite(**sample: Any) -> dict[str, Any]:
        """The weighted sum, with each part's reward under its name, and the part's own parts behind a slash.

        Process rewards add up with the same weights. A part without a verdict leaves the whole without one.
        """
        told: dict[str, float] = {}
        total, process = 0.0, _Process()
        details = []
        for part, function, keywords in parts:
            value = _value(part.label, function, {name: sample[name] for name in keywords})
            reward, own = read_reward(value)
            told |= {part.label: reward} | {f"{part.label}/{name}": number for name, number in own.items()}
            if isinstance(value, Mapping) and isinstance(value.get("detail"), str) and value["detail"]:
                details.append(f"{part.label}: {value['detail']}")
            if part.gate and reward <= 0:
                total, process = 0.0, _Process()
                break
            total += part.weight * reward
            process.add(part.label, part.weight, value)
        if len(told) >= PARTS_MAX:
            raise ValueError(f"the parts hold {len(told)} numbers, of which a verdict has room for {PARTS_MAX - 1}")
        return {"reward": total, **told, **process.found(), **({"detail": "; ".join(details)} if details else {})}

    composite.__signature__ = Signature(  # type: ignore[attr-defined]  # what it is to be given
        [Parameter(name, Parameter.KEYWORD_ONLY) for name in KEYWORDS if name in wanted]
    )
    return composite


def _value(label: str, function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """What the function returned, checked. Its failure is the whole's, told with its name."""
    print(f"asking {label}", file=sys.stderr)  # the last output is in the verdict of who is killed
    try:
        value = function(**keywords)
        read_reward(value)
        read_process_rewards(value)
    except Exception as error:
        raise PartFailed(f"{label}: {type(error).__name__}: {error}") from error
    return value


class PartFailed(Exception):
    """A part has no verdict, so that the whole has none."""


class _Process:
    """Process rewards of several parts: of tokens or of steps, not both."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.steps: dict[int, float] = {}

    def add(self, label: str, weight: float, value: Any) -> None:
        """Add those of a part, times its weight."""
        packed, steps = read_process_rewards(value)
        if packed is not None:
            tokens = read_float32(packed)
            if self.tokens and len(tokens) != len(self.tokens):
                raise PartFailed(f"{label}: rewards {len(tokens)} tokens, and another part {len(self.tokens)}")
            self.tokens = [a + weight * b for a, b in zip(self.tokens or [0.0] * len(tokens), tokens, strict=True)]
        for end, reward in steps:
            self.steps[end] = self.steps.get(end, 0.0) + weight * reward
        if self.tokens and self.steps:
            raise PartFailed(f"{label}: some parts reward tokens and others steps, which cannot be added up")

    def found(self) -> dict[str, Any]:
        """As a function returns them."""
        if self.tokens:
            return {"token_rewards": self.tokens}
        return {"steps": check_steps(sorted(self.steps.items()))} if self.steps else {}
