"""The built-in reward functions by name, and how each is made ready from its options.

A built-in is a module with two names: `Options`, a frozen dataclass whose fields are what `reward.options` may hold,
and `load(options, setting)`, which gives the function, or raises `UserError` if something that it needs is missing.
Importing such a module must be cheap: packages that only it needs are imported by `load`.

An answer that a function cannot use is a fault of the data: it raises, and the verdict is an error, not a 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from actors.reward.sources import Sources
from actors.reward.verifiers.options import read_options

RewardFunction = Callable[..., Any]

BUILTINS: dict[str, str] = {
    "exact": "actors.reward.verifiers.exact",
    "numeric": "actors.reward.verifiers.numeric",
    "choice": "actors.reward.verifiers.choice",
    "regex": "actors.reward.verifiers.regex",
    "json_schema": "actors.reward.verifiers.json_schema",
    "math_verify": "actors.reward.verifiers.math",
    "judge": "actors.reward.verifiers.judge",
    "composite": "actors.reward.verifiers.composite",
    "code": "actors.reward.code",
    "reasoning_gym": "actors.reward.verifiers.reasoning_gym",
}
"""By name, the module."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a function is loaded, beside its options."""

    base: Path | None = None
    """The recipe's folder, where relative paths start."""
    timeout_s: float = 10.0
    """`reward.timeout_s`: a call that takes longer is killed."""
    shared: int | None = None
    """A descriptor that all processes of a worker have, for limits that they share; see `throttle`."""
    sources: Sources = field(default_factory=Sources)
    """Notes which files the function is made of."""


def load_builtin(name: str, options: Mapping[str, Any], setting: Setting) -> RewardFunction:
    """The built-in function `name`. Raises `UserError` for options that it does not take, and for what is missing."""
    module = import_module(BUILTINS[name])
    setting.sources.note(Path(str(module.__file__)))
    function: RewardFunction = module.load(read_options(module.Options, options, name), setting)
    return function


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` if the built-in `name` does not take these options. Loads nothing that it needs."""
    read_options(import_module(BUILTINS[name]).Options, options, name)
