"""A held-out curve must be of what is trained: the same episode, scored alike, all of it by one version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.episode import watchdog
from actors.episode.actor import EpisodeWorker
from actors.episode.builtin import Function
from actors.episode.config import EpisodeConfig
from actors.episode.policy import GivenUp
from actors.evaluator.actor import Evaluator
from actors.evaluator.config import EvaluationConfig
from actors.evaluator.episodes import Episodes
from actors.evaluator.held_out import HeldOut, Problem
from actors.evaluator.pins import Pins
from actors.rollout.actor import RolloutWorker
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Generation, Request, Sampling
from bus.memory import MemoryBus, MemoryHub
from bus.reading import read_to_end
from bus.table import ROLLOUTS
from bus.weights import Local
from schemas import Prompt, Rollout, UserError, WeightVersion
from tests.actors.episode.test_episode_worker import Digits
from tests.actors.test_evaluator import DATA, DEADLINE_S, STEPS, FakeEngine, FakePool, Run, working

ROWS = [Problem(str(k), (ord(str(k)),), {"number": k}) for k in range(4)]
GREEDY = Sampling(8, temperature=0.0)


class Versions(FakeEngine):
    """Says the version that it holds, as one token; `between` is called before each answer."""

    def __init__(self, between: Callable[[Versions], Any] = lambda engine: None) -> None:
        super().__init__()
        self.between = between
        self.cancelled = 0

    async def generate(self, request: Request) -> Generation:
        self.between(self)
        self.asked.append(self.version)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        tokens = (ord("0") + self.version,)
        return Generation(request.sample_id, request.prompt_tokens, tokens, (0.0,), ((self.version, 1),), "stop")


def decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def held_out(function: Any, problems: list[Problem] = ROWS, **config: Any) -> HeldOut:
    episodes = Episodes(EpisodeConfig(**config), Function(function, {}), Digits(), GREEDY, decode)
    return HeldOut(DATA, problems, GREEDY, decode, episodes)


def evaluator(run: Run, function: Any, engine: FakeEngine) -> Evaluator:
    settings = EvaluationConfig(every=2, count=len(ROWS))
    pins = Pins(run.folder / "evaluator-0", run)
    return Evaluator(run.bus, settings, STEPS, held_out(function), engine, FakePool(), pins, "evaluator-0")


async def says_it_twice(prompt: Prompt, policy: Any) -> float:
    """Two turns; its reward is the mean of what was said."""
    conversation = policy.chat()
    first = await conversation.ask()
    second = await conversation.ask("again")
    return (int(first.text) + int(second.text)) / 2


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    await run.bus.setup()
    async with asyncio.timeout(DEADLINE_S):
        yield run


async def test_a_version_is_evaluated_by_its_own_weights_only_in_all_turns(run: Run) -> None:
    actor = evaluator(run, says_it_twice, Versions())
    async with working(actor) as task:
        await run.announce_all(actor)
        await task
    messages = await run.evaluations()
    assert [(message.version, message.reward) for message in messages] == [(v, float(v)) for v in (0, 2, 4, 6)]
    assert {message.count for message in messages} == {len(ROWS)}
    assert {(message.response_length, message.finished) for message in messages} == {(2.0, 1.0)}


async def test_an_engine_that_changes_its_weights_in_mid_episode_is_found_out_whatever_the_function_swallows() -> None:
    async def swallows(prompt: Prompt, policy: Any) -> float:
        conversation = policy.chat()
        for text in ("", "again"):
            try:
                await conversation.ask(text or ())
            except Exception:
                return 1.0
        return 1.0

    def changes(engine: Versions) -> None:
        engine.version = int(len(engine.asked) >= 3)

    with pytest.raises(ExceptionGroup) as raised:
        await held_out(swallows, ROWS[:2]).evaluate(Versions(changes), FakePool(), 0)
    assert raised.group_contains(RuntimeError, match="version 0 was to answer")


async def test_what_comes_to_nothing_is_told_is_no_zero_and_ends_nothing(run: Run) -> None:
    """One raises, one finds something to mend, one is given up; the version stands in the log, and so do the next."""

    async def some_fail(prompt: Prompt, policy: Any) -> float:
        match prompt.task["number"]:
            case 0:
                raise KeyError("answer")
            case 1:
                raise UserError("no such tool", "mend it")
            case 2:
                raise GivenUp("timeout", "it was too slow")
        await policy.chat().ask()
        return 0.75

    actor = evaluator(run, some_fail, Versions())
    with capture_logs() as logs:
        async with working(actor) as task:
            await run.announce_all(actor)
            await task
    messages = await run.evaluations()
    assert [message.version for message in messages] == [0, 2, 4, 6]
    assert {message.reward for message in messages} == {0.75}
    assert all(message.verdicts == {"error": 2, "timeout": 1, "scored": 1} for message in messages)
    told = " ".join(line["detail"] for line in logs if line["event"] == "evaluation_without_verdict")
    assert "KeyError: 'answer' (" in told
    assert "test_evaluated_episodes.py, line" in told


async def test_one_that_hangs_or_says_nothing_holds_up_no_other_and_asks_on_no_more() -> None:
    engine = Versions()
    engine.may_answer.clear()

    async def asks_nothing_or_waits(prompt: Prompt, policy: Any) -> float:
        if prompt.task["number"] == 0:
            return 1.0
        if prompt.task["number"] == 1:
            await asyncio.Event().wait()
        await policy.chat().ask()
        return 1.0

    evaluation = await held_out(asks_nothing_or_waits, timeout_s=0.1).evaluate(engine, FakePool(), 0)
    assert evaluation.verdicts == {"error": 1, "timeout": 3}
    assert evaluation.reward is None
    assert engine.cancelled == 2


async def test_one_that_blocks_all_others_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training: nothing else would end it, and the run waits for its first evaluation."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "NOTICED_S", 0.1)

    async def blocks(prompt: Prompt, policy: Any) -> float:
        await policy.chat().ask()
        if prompt.task["number"] == 1:
            forgets_to_await()
        return 1.0

    def forgets_to_await() -> None:
        time.sleep(20)

    evaluation = await held_out(blocks, held_up_s=0.3).evaluate(Versions(), FakePool(), 0)
    assert (evaluation.reward, evaluation.verdicts) == (1.0, {"scored": 3, "timeout": 1})


async def test_a_failure_is_tried_again_on_the_answers_that_it_had() -> None:
    """As in training, where the log has them."""
    tries = 0

    async def fails_once(prompt: Prompt, policy: Any) -> float:
        nonlocal tries
        tries += 1
        await policy.chat().ask()
        if tries == 1:
            raise KeyError("once")
        return 1.0

    engine = Versions()
    evaluation = await held_out(fails_once, ROWS[:1], retries=1).evaluate(engine, FakePool(), 0)
    assert (evaluation.reward, tries, len(engine.asked)) == (1.0, 2, 1)


class NoWeights:
    async def fetch(self, event: WeightVersion) -> Local:
        raise AssertionError("there are none")

    def close(self) -> None: ...


async def scored_by_tokens(prompt: Prompt, policy: Any) -> float:
    """Three turns, one of them ended at a string; what it earns tells of every token that was said."""
    conversation = policy.chat()
    await conversation.ask(max_new_tokens=3)
    await conversation.ask(" what ", stop=["3", "7"])
    await conversation.ask(" what ", max_new_tokens=4)
    said = [token for one in policy.said for token in one.answer.tokens.tolist()]
    return float(sum((place + 1) * token for place, token in enumerate(said)))


async def test_an_episode_gets_the_score_that_it_gets_in_training_at_the_same_weights(tmp_path: Path) -> None:
    """Greedy, by the real engine: in training over the log, in evaluation without one."""
    from actors.rollout.threaded import ThreadedEngine
    from actors.rollout.torch_engine import Decoder
    from ops.text import HfTokenizer
    from recipes.multiturn import make_model

    path = str(tmp_path / "model")
    make_model(Path(path), seed=3)
    config = RolloutConfig(slots=8, max_new_tokens=6, deterministic=True)
    tokenizer = HfTokenizer(path)
    sampling = Sampling(max_new_tokens=6, temperature=0.0, stop_token_ids=(1,))
    words = [f"guess {k}" for k in range(1, 7)]

    bus = MemoryBus("run", MemoryHub())
    await bus.setup()
    engine = ThreadedEngine(Decoder.from_pretrained(path, config, version=0))
    rollouts = RolloutWorker(bus, config, engine, tokenizer, (1,), NoWeights(), "rollout-0", turns=True)
    rollouts.sampling = sampling
    episodes = EpisodeWorker(bus, EpisodeConfig(), Function(scored_by_tokens, {}), tokenizer, 6, "episode-0")
    stop = asyncio.Event()
    tasks = [asyncio.create_task(work) for work in (rollouts.run(stop), episodes.run(stop))]
    for k, text in enumerate(words):
        await bus.publish(Prompt(group_id=k, index=0, group_size=1, prompt=text, task={}, seed=k, min_version=0))
    trained: dict[str, float] = {}
    async with asyncio.timeout(DEADLINE_S):
        while len(trained) < len(words):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.02)
            async for entry in read_to_end(bus, ROLLOUTS):
                rollout = entry.message()
                assert isinstance(rollout, Rollout)
                trained[str(rollout.prompt)] = rollout.reward or 0.0
    stop.set()
    await asyncio.gather(*tasks)

    evaluated: dict[str, float] = {}

    async def recorded(prompt: Prompt, policy: Any) -> float:
        evaluated[str(prompt.prompt)] = await scored_by_tokens(prompt, policy)
        return evaluated[str(prompt.prompt)]

    own = ThreadedEngine(Decoder.from_pretrained(path, config, version=0))
    await own.start()
    try:
        asked = Episodes(EpisodeConfig(), Function(recorded, {}), tokenizer, sampling, tokenizer.decode)
        problems = [Problem(text, tokenizer.encode_prompt(text), {}) for text in words]
        evaluation = await HeldOut(DATA, problems, sampling, tokenizer.decode, asked).evaluate(own, FakePool(), 0)
    finally:
        await own.close()
    assert evaluated == trained
    assert evaluation.reward == pytest.approx(sum(trained.values()) / len(words))
    assert len(set(trained.values())) > 3
