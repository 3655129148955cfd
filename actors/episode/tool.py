"""Tool use: the model calls tools in the common format, is told what they answer, and goes on until it calls none.

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

A chat is answered with messages of the role `tool`, by the model's chat template; a text with
`<tool_response>391</tool_response>`. What a tool answers is an observation and never trained.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.episode.policy import Policy
from actors.episode.tool_calls import ToolCall
from actors.episode.tools import ToolError, load_tools, too_late
from schemas import Prompt

CUT = " ... (cut)"


@dataclass(frozen=True, slots=True)
class Options:
    """What `episode.options` may hold for `tool`."""

    tools: tuple[str, ...] = ("calculator",)
    """calculator, python, or functions of the user's, `file.py:function`."""
    turns: int = 8
    """Answers of the model, at most."""
    timeout_s: float = 10.0
    """Of one call, from its own start."""
    output_chars: int = 4000
    """Of one tool's answer, at most; the rest is cut."""
    tell: bool = True
    """Whether the chat template is told of the tools."""

    def __post_init__(self) -> None:
        for name in ("turns", "timeout_s", "output_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} => Set it above 0")


class ToolUse:
    """The episode. Errors of tools and malformed calls go to the model; the run's reward function judges the end."""

    def __init__(self, options: Options, base: Path) -> None:
        self._options = options
        self._tools = load_tools(options.tools, options.timeout_s, base)
        self.place = ""
        self.replayable = all(tool.replayable for tool in self._tools.values())

    async def start(self) -> None:
        """Start the tools."""
        for tool in self._tools.values():
            await tool.start()

    async def close(self) -> None:
        """Close the tools."""
        for tool in self._tools.values():
            await tool.close()

    async def run(self, prompt: Prompt, policy: Policy) -> None:
        """Ask, call, tell, until no tool is called or the turns are used."""
        text = isinstance(prompt.prompt, str)
        tools = [tool.spec for tool in self._tools.values()] if self._options.tell and not text else []
        conversation = policy.chat(tools)
        reply = await conversation.ask()
        for _ in range(self._options.turns - 1):
            calls = reply.tool_calls
            if not calls:
                return
            answers = await asyncio.gather(*map(self._called, calls))
            reply = await conversation.ask([_message(*pair, text) for pair in zip(calls, answers, strict=True)])

    async def _called(self, call: ToolCall) -> str:
        """What the model is told of a call."""
        if call.error:
            return f"error: {call.error}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name[:100]}; there are {', '.join(self._tools)}"
        try:
            async with asyncio.timeout(None if tool.keeps_time else self._options.timeout_s):
                answer = await tool.call(call.arguments)
        except TimeoutError:
            answer = f"error: {too_late(call.name, self._options.timeout_s)}"
        except ToolError as error:
            answer = f"error: {error}"
        except Exception as error:  # a function of the user's: the model has to live with it, as a person would
            answer = f"error: {type(error).__name__}: {error}"
        answer = answer.encode(errors="replace").decode()  # a function's text may hold half a surrogate pair
        most = self._options.output_chars
        return answer if len(answer) <= most else answer[:most] + CUT


def _message(call: ToolCall, answer: str, text: bool) -> dict[str, Any]:
    content = f"<tool_response>{answer}</tool_response>" if text else answer
    return {"role": "tool", "name": call.name, "content": content}
