"""An agent as anybody writes it: it asks OpenAI's API, runs the tools that are called, and prints the answer.

Nothing in it knows of training. With any other server, set OPENAI_BASE_URL and:
echo '{"prompt": [{"role": "user", "content": "17*23"}]}' | python agent.py
"""

import json
import sys
from typing import Any

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiplies two numbers.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def calculator(expression: Any = "", **others: Any) -> str:
    """The product in `17*23`; models call with what they like."""
    a, _, b = str(expression).partition("*")
    return str(int(a) * int(b)) if a.strip().isdecimal() and b.strip().isdecimal() else "error"


def main() -> None:
    """Talk until the model calls no tool, three turns at most."""
    client: Any = OpenAI()
    messages = json.load(sys.stdin)["prompt"]
    for _ in range(3):
        answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            arguments = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(**arguments)})
    print(answer.content)


if __name__ == "__main__":
    main()
