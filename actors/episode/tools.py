"""Tools that a model can call: a calculator, Python in the sandbox, and functions of the user's."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from actors.episode.multi_turn import called
from actors.functions import load_function
from schemas import UserError

if TYPE_CHECKING:
    from actors.reward.sandbox import Sandbox

log = structlog.get_logger()

EXPRESSION_CHARS_MAX = 1000
NUMBER_BITS_MAX = 4096  # of a whole number on the way: 9**9**9 must not fill the memory
EXPONENT_MAX = 4096
PYTHON_CHILDREN = 2


class ToolError(Exception):
    """A call that failed by the model's fault: it is told why, and goes on."""


def too_late(name: str, timeout_s: float) -> str:
    """What the model is told of a call that took too long."""
    return f"{name} took longer than {timeout_s:g} s"


class Tool(Protocol):
    """`spec` is its description in OpenAI's format. One that is not `replayable` makes its episode begin anew.

    One that `keeps_time` ends its calls by itself: it may have to wait before a call begins, which is not the call's.
    """

    name: str
    spec: dict[str, Any]
    replayable: bool
    keeps_time: bool

    async def start(self) -> None:
        """Before the first call. Raises `UserError` where it cannot work."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What it answers. Raises `ToolError`, and whatever a function of the user's raises."""

    async def close(self) -> None:
        """After the last."""


def _spec(name: str, description: str, properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Calculator:
    """`{"expression": "2 * (3 + 4)"}`: numbers, + - * / // % **, and parentheses."""

    name = "calculator"
    replayable = True
    keeps_time = False
    spec = _spec(
        "calculator",
        "Evaluate an arithmetic expression.",
        {"expression": {"type": "string", "description": "for example 2 * (3 + 4)"}},
        ["expression"],
    )

    async def start(self) -> None:
        """Nothing to start."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The value."""
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            raise ToolError("calculator needs the argument expression, a text")
        return calculate(expression)

    async def close(self) -> None:
        """Nothing to close."""


_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression. Raises `ToolError` for all else."""
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise ToolError(f"an expression has at most {EXPRESSION_CHARS_MAX} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, OverflowError, MemoryError):
        raise ToolError(f"not an arithmetic expression: {expression[:100]}") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value: int | float = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and (abs(b) > EXPONENT_MAX or _bits(a) * abs(b) > NUMBER_BITS_MAX):
                raise ToolError("the number is too large")
            value = _BINARY[type(op)](a, b)
        case _:
            raise ToolError("only numbers, + - * / // % ** and parentheses")
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ToolError("the value is no finite real number")
    if _bits(value) > NUMBER_BITS_MAX:
        raise ToolError("the number is too large")
    return value


def _bits(value: int | float) -> int:
    return value.bit_length() if isinstance(value, int) else 64


class Python:
    """`{"code": "print(2 + 3)"}`: a program in the sandbox, each by itself; the model is told what it prints."""

    name = "python"
    replayable = True
    keeps_time = True
    spec = _spec(
        "python",
        "Run a Python program and return what it prints. Nothing is kept between calls.",
        {"code": {"type": "string", "description": "a whole program"}},
        ["code"],
    )

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sandbox: Sandbox | None = None

    async def start(self) -> None:
        """Start the sandbox. Raises `UserError` where this machine cannot isolate."""
        from actors.reward.sandbox import Limits, Sandbox

        self._sandbox = Sandbox(Limits(time_s=self._timeout_s), PYTHON_CHILDREN)
        await asyncio.to_thread(self._sandbox.start)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the program printed, and what went wrong; also that the sandbox died, which it did three times then."""
        from actors.reward.sandbox import SandboxLost

        code = arguments.get("code")
        if not isinstance(code, str):
            raise ToolError("python needs the argument code, a text")
        assert self._sandbox is not None
        try:
            result = await self._sandbox.run(code)
        except SandboxLost as error:
            log.warning("tool_lost", tool=self.name, reason=str(error))
            raise ToolError("python could not run the program") from error
        if result.status == "ok":
            return result.stdout
        if result.status == "timeout":
            raise ToolError(f"{result.stdout}\n{too_late(self.name, self._timeout_s)}".lstrip("\n"))
        last = result.stderr.strip().rpartition("\n")[2]
        raise ToolError("\n".join(filter(None, (result.stdout, f"{result.status}: {last}" if last else result.status))))

    async def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            await asyncio.to_thread(self._sandbox.close)


_JSON_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class UserTool:
    """A function of the user's, plain or async. Its name, docstring and parameters are what the model is told."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.keeps_time = False
        self.replayable = bool(getattr(function, "replayable", True))
        self._function = function
        parameters = inspect.signature(function, eval_str=True).parameters
        kinds = {
            name: {"type": kind} if (kind := _JSON_TYPES.get(one.annotation)) else {}
            for name, one in parameters.items()
        }
        required = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
        self._signature = inspect.signature(function)
        self.spec = _spec(self.name, inspect.getdoc(function) or "", kinds, required)

    async def start(self) -> None:
        """Nothing to start."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the function returns, as text or JSON."""
        try:
            self._signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{self.name}: {error}") from None
        value = await called(self._function, None, **arguments)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    async def close(self) -> None:
        """Nothing to close."""


def load_tools(names: Sequence[str], timeout_s: float, base: Path) -> dict[str, Tool]:
    """The tools by name: calculator, python, or `file.py:function`. Raises `UserError`."""
    tools: dict[str, Tool] = {}
    for name in names:
        tool: Tool
        if name == "calculator":
            tool = Calculator()
        elif name == "python":
            tool = Python(timeout_s)
        else:
            tool = UserTool(load_function(name, base, builtins=("calculator", "python")))
        if tool.name in tools:
            raise UserError(f"episode.options.tools has two tools named {tool.name}.", "Rename one of them.")
        tools[tool.name] = tool
    return tools
