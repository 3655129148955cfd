"""Functions of the user's fail, hang and are killed in their midst: each sample ends once, and the log says how."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.episode.actor import EpisodeWorker
from actors.episode.builtin import Function, load_episode
from actors.episode.config import EpisodeConfig
from actors.episode.exchange import Exchange
from actors.reward.config import RewardConfig
from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus, BusFull, Delivery
from bus.shell import serve
from bus.table import ANSWERS, DROPPED, ROLLOUTS, TURN_WORKERS, TURNS, Stream
from schemas import Answer, Dropped, Message, Prompt, Rollout, Turn, UserError

PROMPT = Prompt(group_id=1, index=0, group_size=1, prompt="2", task={}, seed=7, min_version=0)


class Digits:
    """A token a character."""

    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        return tuple(map(ord, prompt))

    encode = encode_prompt

    def quoted(self, text: str) -> str:
        return text

    def render(self, messages: Any, tools: Any = ()) -> str:
        raise NotImplementedError

    def spelling(self, token: int) -> str:
        return chr(token)

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


@contextlib.asynccontextmanager
async def at_work(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def bus() -> Bus:
    bus = MemoryBus("run", MemoryHub())
    await bus.setup(ack_wait_s=0.3)
    return bus


async def model(bus: Bus) -> None:
    """Answers each turn with two tokens."""

    async def answer(message: Message, delivery: Delivery) -> list[Message]:
        assert isinstance(message, Turn)
        tokens, logprobs, segments = np.array([5, 6], "<i4"), np.array([-1, -2], "<f4"), ((0, 2),)
        return [
            Answer(
                group_id=message.group_id, index=message.index, turn=message.id, tokens=tokens, logprobs=logprobs,
                segments=segments, finish="stop", text="56",
            )
        ]  # fmt: skip

    await serve(bus, TURN_WORKERS, answer, room=lambda: 8, stop=asyncio.Event(), name="model")


def worker(bus: Bus, function: Any, name: str = "episode-0", **config: Any) -> Any:
    actor = EpisodeWorker(bus, EpisodeConfig(**config), Function(function, {}), Digits(), 8, name)
    return actor.run(asyncio.Event())


async def first(bus: Bus, stream: Stream) -> Any:
    async with asyncio.timeout(30.0), contextlib.aclosing(bus.read(stream)) as entries:  # type: ignore[type-var]
        return (await anext(entries)).message()


async def test_a_function_that_hangs_or_fails_ends_its_sample_with_the_reason(bus: Bus) -> None:
    async def hangs(prompt: Prompt, policy: Any) -> None:
        await asyncio.Event().wait()

    async with at_work(worker(bus, hangs, timeout_s=0.1)):
        await bus.publish(PROMPT)
        dropped = await first(bus, DROPPED)
    assert (dropped.reason, dropped.sample_id) == ("timeout", "1-0")


async def test_a_failure_is_named_tried_again_and_then_ends_the_sample(bus: Bus) -> None:
    calls = 0

    async def fails(prompt: Prompt, policy: Any) -> None:
        nonlocal calls
        calls += 1
        await policy.chat().ask()
        raise KeyError("answer")

    with capture_logs() as logs:
        async with at_work(model(bus)), at_work(worker(bus, fails, retries=1)):
            await bus.publish(PROMPT)
            dropped = await first(bus, DROPPED)
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.tokens, calls) == ("error", 2, 2)
    assert "KeyError" in dropped.detail
    assert (await bus.info(TURNS)).messages == 1  # the second try had its answer from the log
    assert [line["event"] for line in logs].count("episode_failed") == 2


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"prompt_tokens": [1], "n": 100_000}, "n must be 1 to 64"),
        ({"prompt_tokens": [1], "n": 0}, "n must be 1 to 64"),
        ({"prompt_tokens": [1], "max_new_tokens": -3}, "max_new_tokens must be 1 at least"),
        ({"prompt_tokens": [1.5]}, "the ids of tokens"),
        ({"prompt_tokens": "guess"}, "the ids of tokens"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused_with_the_reason(bus: Bus, asked: dict[str, Any], told: str) -> None:
    async def asks(prompt: Prompt, policy: Any) -> None:
        await policy.generate(**asked)

    async with at_work(model(bus)), at_work(worker(bus, asks, retries=0)):
        await bus.publish(PROMPT)
        dropped = await first(bus, DROPPED)
    assert (dropped.reason, told in dropped.detail) == ("error", True)
    assert (await bus.info(TURNS)).messages == 0


async def test_a_function_that_cancels_itself_has_failed_and_its_sample_is_told_of(bus: Bus) -> None:
    async def cancels(prompt: Prompt, policy: Any) -> None:
        raise asyncio.CancelledError

    async with at_work(worker(bus, cancels, retries=0)):
        await bus.publish(PROMPT)
        dropped = await first(bus, DROPPED)
    assert (dropped.reason, "cancelled from within" in dropped.detail) == ("error", True)


async def test_a_function_that_exits_has_failed_and_takes_no_other_episode_along(bus: Bus) -> None:
    async def exits(prompt: Prompt, policy: Any) -> None:
        raise SystemExit(3)

    async with at_work(worker(bus, exits, retries=0)):
        await bus.publish(PROMPT)
        dropped = await first(bus, DROPPED)
    assert (dropped.reason, "it called exit(3)" in dropped.detail) == ("error", True)


async def test_a_trajectory_that_is_too_large_for_the_log_is_dropped_and_kills_no_worker(bus: Bus) -> None:
    async def tells_much(prompt: Prompt, policy: Any) -> Any:
        await policy.chat().ask()
        told = [{"role": "tool", "content": "x" * 1_000_000}] * 9
        return dataclasses.replace(policy.trajectory(reward=1.0), messages=told)

    async with at_work(model(bus)), at_work(worker(bus, tells_much)):
        await bus.publish(PROMPT)
        dropped = await first(bus, DROPPED)
    assert (dropped.sample_id, "cannot be stored" in dropped.detail) == ("1-0", True)


async def test_a_function_of_which_nothing_ever_comes_stops_the_run_but_one_bad_row_or_a_slow_model_does_not(
    bus: Bus,
) -> None:
    async def asks_nothing(prompt: Prompt, policy: Any) -> float:
        return 1.0

    async def waits(prompt: Prompt, policy: Any) -> None:
        await policy.chat().ask()  # there is no model here

    async def hangs(prompt: Prompt, policy: Any) -> None:
        await asyncio.Event().wait()

    def groups(start: int, end: int) -> list[Prompt]:
        return [dataclasses.replace(PROMPT, group_id=group) for group in range(start, end)]

    async def fate(function: Any, prompts: list[Prompt], timeout_s: float = 20.0) -> str:
        bus = MemoryBus("run", MemoryHub())
        await bus.setup(ack_wait_s=5.0)
        for prompt in prompts:
            await bus.publish(prompt)
        work = asyncio.ensure_future(worker(bus, function, timeout_s=timeout_s))
        async with asyncio.timeout(30.0):
            while not work.done() and (await bus.info(DROPPED)).messages < len(prompts):
                await asyncio.sleep(0.01)
            if work.done():
                return str(work.exception())
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return "goes on"

    one_row = [dataclasses.replace(PROMPT, index=index, group_size=9) for index in range(9)]
    assert "made nothing to train of 8 groups: the model said nothing" in await fate(asks_nothing, groups(1, 9))
    assert "made nothing to train of 8 groups: longer than episode.timeout_s" in await fate(hangs, groups(1, 9), 0.1)
    assert await fate(asks_nothing, one_row) == "goes on"
    assert await fate(waits, groups(1, 9), 0.5) == "goes on"  # which is time to ask


async def test_a_failure_within_ours_is_named_by_the_line_of_the_function_that_led_there(bus: Bus) -> None:
    async def asks_with_text(prompt: Prompt, policy: Any) -> None:
        await policy.generate("text")

    async with at_work(worker(bus, asks_with_text, retries=0)):
        await bus.publish(PROMPT)
        dropped = await first(bus, DROPPED)
    assert "test_episode_worker.py, line" in dropped.detail


async def test_what_no_episode_may_return_is_told_with_the_function_and_what_it_may_return(
    bus: Bus, tmp_path: Path
) -> None:
    """The error named a line of ours, and not what would be right."""
    returned = {
        "{'reward': 1.0}": "returned {'reward': 1.0} (dict); an episode returns its reward as a finite number, None",
        "'right'": "returned 'right' (str); an episode returns",
        "float('nan')": "returned nan (float); an episode returns",
        "policy.chat().ask()": "returned a coroutine that was not awaited; an episode returns",
        "policy.trajectory(1.0, turn_rewards=[1, 2, 3])": "3 turn rewards for 1 turns",
        "policy.trajectory('much')": "",
    }
    for number, (value, told) in enumerate(returned.items()):
        name = tmp_path / f"task{number}.py"
        name.write_text(f"async def episode(prompt, policy):\n    await policy.chat().ask()\n    return {value}\n")
        config = EpisodeConfig(function=f"{name}:episode")
        function = load_episode(config, RewardConfig(function="exact"), tmp_path)
        own = MemoryBus("run", MemoryHub())
        await own.setup(ack_wait_s=5.0)
        actor = EpisodeWorker(own, EpisodeConfig(retries=0), function, Digits(), 8, "episode-0")
        async with at_work(model(own)), at_work(actor.run(asyncio.Event())):
            await own.publish(PROMPT)
            dropped = await first(own, DROPPED)
        assert f"episode ({name}, line 1)" in dropped.detail, dropped.detail
        assert told in dropped.detail
        assert "actors/" not in dropped.detail


@pytest.mark.parametrize("value", ["True", "__import__('numpy').float32(1.0)", "__import__('numpy').array(1.0)"])
async def test_any_finite_number_is_a_reward(bus: Bus, tmp_path: Path, value: str) -> None:
    (tmp_path / "task.py").write_text(
        f"async def episode(prompt, policy):\n    await policy.chat().ask()\n    return {value}\n"
    )
    function = load_episode(EpisodeConfig(function="task.py:episode"), RewardConfig(function="exact"), tmp_path)
    actor = EpisodeWorker(bus, EpisodeConfig(retries=0), function, Digits(), 8, "episode-0")
    async with at_work(model(bus)), at_work(actor.run(asyncio.Event())):
        await bus.publish(PROMPT)
        assert (await first(bus, ROLLOUTS)).reward == 1.0


@pytest.mark.parametrize(
    ("parameters", "options", "told"),
    [
        ("prompt", {}, "too many positional arguments"),
        ("prompt, policy, turns=3", {"turn": 4}, "Did you mean turns?"),
        ("prompt, policy, turns", {}, "missing a required argument: 'turns'"),
        ("prompt, policy, **options", {"any": 1}, None),
    ],
)
def test_a_function_that_cannot_be_called_as_the_recipe_says_is_refused_before_the_run(
    tmp_path: Path, parameters: str, options: dict[str, Any], told: str | None
) -> None:
    (tmp_path / "task.py").write_text(f"async def episode({parameters}):\n    return 1.0\n")
    config = EpisodeConfig(function="task.py:episode", options=options)
    if told is None:
        load_episode(config, RewardConfig(function="exact"), tmp_path)
        return
    with pytest.raises(UserError) as refused:
        load_episode(config, RewardConfig(function="exact"), tmp_path)
    assert told in f"{refused.value} {refused.value.remedy}"


@pytest.mark.parametrize(
    ("replayable", "event", "turns"), [(True, "episode_resumed", 2), (False, "episode_restarted", 3)]
)
async def test_a_killed_episode_is_run_again_on_the_answers_that_it_had(
    bus: Bus, replayable: bool, event: str, turns: int
) -> None:
    stuck = asyncio.Event()

    async def episode(prompt: Prompt, policy: Any) -> float:
        conversation = policy.chat()
        await conversation.ask()
        if not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()
        await conversation.ask("3")
        return 0.5

    episode.replayable = replayable  # type: ignore[attr-defined]
    async with at_work(model(bus)):
        await bus.publish(PROMPT)
        async with at_work(worker(bus, episode)):
            await asyncio.wait_for(stuck.wait(), 30.0)
        with capture_logs() as logs:
            async with at_work(worker(bus, episode, "episode-1")):
                rollout = await first(bus, ROLLOUTS)
    assert isinstance(rollout, Rollout)
    assert rollout.tokens.tolist() == [5, 6, ord("3"), 5, 6]
    assert rollout.observations.tolist() == [2, 1]
    assert (rollout.reward, len(rollout.turns)) == (0.5, 2)
    assert (await bus.info(TURNS)).messages == (await bus.info(ANSWERS)).messages == turns
    assert event in [line["event"] for line in logs]


async def test_an_episode_that_asks_otherwise_goes_on_freshly_and_says_so(bus: Bus) -> None:
    runs = 0

    async def episode(prompt: Prompt, policy: Any) -> None:
        nonlocal runs
        runs += 1
        conversation = policy.chat()
        await conversation.ask()
        await conversation.ask(str(runs))
        if runs == 1:
            await asyncio.Event().wait()

    async with at_work(model(bus)):
        await bus.publish(PROMPT)
        async with at_work(worker(bus, episode)):
            async with asyncio.timeout(30.0):
                while (await bus.info(ANSWERS)).messages < 2:
                    await asyncio.sleep(0.01)
        with capture_logs() as logs:
            async with at_work(worker(bus, episode, "episode-1")):
                rollout = await first(bus, ROLLOUTS)
    assert rollout.tokens.tolist() == [5, 6, ord("2"), 5, 6]
    (told,) = [line for line in logs if line["event"] == "episode_restarted"]
    assert (told["turn"], told["turns_reused"]) == (1, 1)


async def test_a_log_that_refuses_is_no_failure_of_the_function(bus: MemoryBus) -> None:
    """Found by simulation: a full stream was taken for the function's, and cost the sample."""

    async def asks(prompt: Prompt, policy: Any) -> None:
        await policy.chat().ask()

    bus._hub.full.add(TURNS.name)
    await bus.publish(PROMPT)
    with pytest.raises(BusFull):
        await asyncio.wait_for(worker(bus, asks), 10.0)
    assert (await bus.info(DROPPED)).messages == 0


def answer(turn: Turn, token: int) -> Answer:
    tokens, logprobs = np.array([token], "<i4"), np.array([-1], "<f4")
    return Answer(
        group_id=1, index=0, turn=turn.id, tokens=tokens, logprobs=logprobs, segments=((0, 1),), finish="stop", text=""
    )


TURN = Turn(group_id=1, index=0, number=0, prompt_tokens=[50], seed=7, min_version=0)


async def test_of_two_answers_to_a_turn_every_life_of_an_episode_takes_the_first() -> None:
    """An agent from outside has read it by then."""
    bus = MemoryBus("run", MemoryHub(dedupe_window_s=0.0))
    await bus.setup()
    await bus.publish(answer(TURN, 5))
    await bus.publish(answer(TURN, 6))
    assert (await bus.info(ANSWERS)).messages == 2
    exchange = Exchange(bus, "episode-0")
    await exchange.start()
    answered = await exchange.ask(TURN)
    assert (answered.answer.tokens.tolist(), answered.reused) == ([5], True)


async def test_an_answer_that_the_log_did_not_show_at_first_is_found(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that lags, an entry that was not heard: its turn is not asked again, and nobody would wait less."""
    monkeypatch.setattr("actors.episode.exchange.ASK_AGAIN_S", 0.05)
    await bus.publish(TURN)
    await bus.publish(answer(TURN, 5))
    shows, first = [False, True], bus.first

    async def lags(stream: Stream, key: str) -> Any:
        return await first(stream, key) if shows.pop(0) else None

    monkeypatch.setattr(bus, "first", lags)
    exchange = Exchange(bus, "episode-0")
    await exchange.start()
    answered = await asyncio.wait_for(exchange.ask(TURN), 10.0)
    assert answered.answer.tokens.tolist() == [5]
