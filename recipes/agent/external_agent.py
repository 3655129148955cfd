"""An agent that runs by itself, wherever it likes: it takes one session after the other until the run is over.

python external_agent.py [http://127.0.0.1:8765/v1] [how many at a time]
"""

import asyncio
import json
import sys
from typing import Any

from agent import TOOLS, calculator  # type: ignore[import-not-found]  # its neighbour, found when it is run
from openai import APIConnectionError, APIError, AsyncOpenAI


async def talk(session: Any, url: str) -> None:
    """One session, as in `agent.py`, which ends it by exiting; here that is said."""
    client: Any
    async with AsyncOpenAI(base_url=url, api_key=session["api_key"], max_retries=8) as client:
        messages = session["prompt"]
        for _ in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = calculator(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        await client.post("/sessions/current/end", cast_to=object, body={})  # {"reward": 1.0} would set one


async def work(url: str) -> None:
    """Take sessions while there are some."""
    client: Any
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        while True:
            try:
                await talk(await client.post("/sessions", cast_to=object, body={}), url)
            except APIConnectionError:
                return  # the run is over
            except APIError as error:  # no task for now, most of the time
                print(error)


async def main(url: str = "http://127.0.0.1:8765/v1", count: str = "16") -> None:
    """Work on several sessions at a time."""
    await asyncio.gather(*(work(url) for _ in range(int(count))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
