"""Makes the reward function of a recipe ready: a built-in one or the user's, with its options.

Imported by the reward child, which must start fast.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from actors.functions import load_function, path_of
from actors.reward.verifiers import BUILTINS, Setting, load_builtin
from actors.reward.verifiers.options import near
from schemas.errors import UserError

KEYWORDS = ("prompt", "response", "task", "finish", "sample_id", "tokens", "messages")
"""What a function may ask for, by the names of its parameters."""


def load(spec: str, options: Mapping[str, Any], setting: Setting) -> tuple[Callable[..., Any], list[str]]:
    """The reward function that `spec` names, given its options, and the keywords that it takes. Raises `UserError`."""
    if spec in BUILTINS:
        function = load_builtin(spec, options, setting)
        return function, accepted_keywords(spec, function, {})
    source = spec.rpartition(":")[0]
    beside = path_of(source, setting.base).parent if source.endswith(".py") else Path.cwd()
    setting.sources.watch([beside, *filter(None, [setting.base])])
    function = load_function(spec, setting.base, builtins=BUILTINS, sources=setting.sources)
    if module := sys.modules.get(str(getattr(function, "__module__", ""))):
        setting.sources.note(Path(str(getattr(module, "__file__", None) or "")))
    keywords = accepted_keywords(spec, function, options)
    return (partial(function, **options) if options else function), keywords


def accepted_keywords(spec: str, function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Those of `KEYWORDS` that `function` takes.

    Raises `UserError` if it cannot be called with them and the options alone, or does not take an option.
    """
    remedy = f"Define it as a plain function of any of: {', '.join(KEYWORDS)}."
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"The reward function '{spec}' is asynchronous.", remedy)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"The reward function '{spec}' does not tell its parameters: {error}.", remedy) from error
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    free = [p.name for p in named if p.name not in KEYWORDS and p.kind is not p.POSITIONAL_ONLY]
    for name in options:
        if name in KEYWORDS or not (anything or name in free):
            message = f"The reward function '{spec}' does not take the option {name}."
            taken = near(name, free).replace("It has", "Of its parameters, options may be")
            raise UserError(message, "What rewards are given is no option." if name in KEYWORDS else taken)
    if anything:
        return list(KEYWORDS)
    for p in named:
        given = p.name in KEYWORDS or p.name in options
        if p.default is p.empty and (not given or p.kind is p.POSITIONAL_ONLY):
            raise UserError(f"The reward function '{spec}' wants '{p.name}', which rewards are not given.", remedy)
    return [p.name for p in named if p.name in KEYWORDS]
