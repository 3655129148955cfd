"""The agent behind the golden recording of episodes: two turns, and every other session sets a reward of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import APIConnectionError, APIError, AsyncOpenAI

URL = "http://127.0.0.1:8766/v1"


async def talk(session: Any, rewarded: bool) -> None:
    """One session."""
    client: Any
    async with AsyncOpenAI(base_url=URL, api_key=session["api_key"]) as client:
        messages = session["prompt"]
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        await client.post("/sessions/current/end", cast_to=object, body={"reward": 0.5} if rewarded else {})


async def work(number: int) -> None:
    """Take sessions while there are some."""
    client: Any
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        while True:
            try:
                await talk(await client.post("/sessions", cast_to=object, body={}), number % 2 == 0)
            except APIConnectionError:
                return  # the run is over
            except APIError as error:  # no task for now
                print(error)


async def main() -> None:
    """Four at a time."""
    await asyncio.gather(*map(work, range(4)))


if __name__ == "__main__":
    asyncio.run(main())
