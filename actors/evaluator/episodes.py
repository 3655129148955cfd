"""Held-out problems by the recipe's episode: its turns are answered by the evaluator's own engine, and no log is asked.

The function, the conversation, the bounds and what is made of them are those of training; what differs is who answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

from actors.episode.builtin import Episode
from actors.episode.config import EpisodeConfig
from actors.episode.conversation import Tokenizer
from actors.episode.encoding import Encoding
from actors.episode.exchange import Answered, OnTokens
from actors.episode.played import in_words, played
from actors.episode.policy import GivenUp, Policy
from actors.episode.running import Running
from actors.episode.trajectory import EmptyTrajectory, rollout_of
from actors.episode.watchdog import Watchdog
from actors.evaluator.held_out import Ask, Asked, Pool, Problem
from actors.reward.actor import own_verdict
from actors.reward.verdict import RewardRequest, Status, Verdict
from actors.rollout.engine import ContextTooLongError, Engine, InvalidRequestError, Request, Sampling
from actors.rollout.turn_watch import Outcome, TurnWatch
from actors.rollout.turns import Made, refusal_of, result_of, sampling_of, text_of
from schemas import Answer, Prompt, Rollout, Turn, sample_id

Decode: TypeAlias = Callable[[Sequence[int]], str]


class EngineAnswers:
    """Answers turns with one engine that holds `version`, as `actors.episode.exchange.Exchange` does over the log.

    What an episode asks again it is answered alike, until its `end`. `serving` must hold while turns are asked.
    """

    def __init__(self, engine: Engine, sampling: Sampling, decode: Decode, version: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._decode = decode
        self._version = version
        self._watch = TurnWatch(None, engine, decode, "")
        self._asked: defaultdict[str, dict[str, asyncio.Task[Answer]]] = defaultdict(dict)  # by sample, then turn
        self._failure: Exception | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """End answers at the strings that turns name, soon after they have come."""
        watching = asyncio.create_task(self._watch.watch(), name="watches held-out turns")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, *(self.end(sample) for sample in list(self._asked)), return_exceptions=True)

    async def end(self, sample: str) -> None:
        """Forget an episode, and what it still waits for. Raises what befell the engine: no fault of the episode's."""
        tasks = self._asked.pop(sample, {}).values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    async def ask(self, turn: Turn, on_tokens: OnTokens | None = None) -> Answered:
        """The answer to a turn. `on_tokens` is told of all tokens at once, when there are no more to come."""
        asked = self._asked[turn.sample_id]
        if turn.id not in asked:
            asked[turn.id] = asyncio.create_task(self._answer(turn), name=turn.id)
        answer = await asyncio.shield(asked[turn.id])
        if on_tokens is not None:
            with contextlib.suppress(Exception):  # somebody else's, and not worth the turn
                on_tokens(turn.choice, 0, tuple(answer.tokens.tolist()), tuple(answer.logprobs.tolist()))
        return Answered(answer, False, False)

    async def _answer(self, turn: Turn) -> Answer:
        request = Request(turn.id, tuple(turn.prompt_tokens.tolist()), sampling_of(turn, self._sampling), turn.seed)
        try:
            generation, cut, saved = await self._watch.generate(turn, self._generated(request))
            if generation.finish is None or any(made_by != self._version for made_by, _ in generation.segments):
                raise RuntimeError(f"version {self._version} was to answer {turn.id}; it was {generation.segments}")
        except (ContextTooLongError, InvalidRequestError) as error:
            return refusal_of(turn, error, "")
        except Exception as error:
            self._failure = error
            raise
        text = text_of(turn, self._decode(generation.tokens))
        answer = result_of(turn, Made(generation, text, "", 0.0, 0, cut, saved))
        assert isinstance(answer, Answer)
        return answer

    async def _generated(self, request: Request) -> Outcome:
        return await self._engine.generate(request), None, 0


class Episodes:
    """How held-out problems are asked in a recipe with episodes. `sampling` is of one answer.

    Problem k is the sample of the seed k, at most `config.at_once` are asked at a time. An episode that comes to
    nothing has the verdict `timeout`, `invalid` if there was nothing to train of it, or `error`.
    """

    def __init__(
        self, config: EpisodeConfig, function: Episode, tokenizer: Tokenizer, sampling: Sampling, decode: Decode
    ) -> None:
        self._config = config
        self._function = function
        self._tokenizer = tokenizer
        self._encoding = Encoding(tokenizer)
        self._sampling = sampling
        self._decode = decode
        self._room = asyncio.Semaphore(config.at_once)

    async def start(self) -> None:
        """Before the first evaluation. Raises `UserError` where the function cannot work."""
        await self._function.start()

    async def close(self) -> None:
        """After the last one."""
        self._encoding.close()
        await self._function.close()

    @contextlib.asynccontextmanager
    async def asking(self, engine: Engine, pool: Pool, version: int) -> AsyncIterator[Ask]:
        """What runs the episode of problem k with an engine that holds `version`, and has it scored.

        A call that holds up all others is interrupted as in training: its verdict is `timeout`.
        """
        answers = EngineAnswers(engine, self._sampling, self._decode, version)

        async def ask(k: int, problem: Problem) -> Asked:
            async with self._room:
                try:
                    outcome = await self._outcome(answers, version, k, problem)
                finally:
                    await answers.end(sample_id(k, 0))
            if isinstance(outcome, Verdict):
                return Asked(outcome, False, 0)
            verdict = (
                own_verdict(outcome) if outcome.reward is not None else await pool.score(RewardRequest.of(outcome))
            )
            said = len(outcome.tokens) - int(outcome.observations[1::2].sum())
            return Asked(verdict, outcome.finish == "stop", said)

        async with answers.serving():
            with contextlib.closing(Running(None, 0)) as nobody, Watchdog(nobody, self._config.held_up_s, "evaluator"):
                yield ask

    async def _outcome(self, answers: EngineAnswers, version: int, k: int, problem: Problem) -> Rollout | Verdict:
        """The rollout of a problem, or the verdict of an episode that made none."""
        config, failure = self._config, ""
        deadline = asyncio.timeout(config.timeout_s)
        try:
            async with deadline:
                prompt = Prompt(
                    group_id=k, index=0, group_size=1, prompt=problem.prompt, task=dict(problem.task), seed=k,
                    min_version=version,
                )  # fmt: skip
                for retry in range(config.retries + 1):
                    attempt = 0 if self._function.replayable else retry
                    most = self._sampling.max_new_tokens
                    policy = Policy(prompt, answers, self._tokenizer, self._encoding, config, most, attempt)
                    try:
                        trajectory = await played(self._function, prompt, policy, lambda reason: None)
                        return rollout_of(prompt, trajectory, per_turn=config.samples == "turn")
                    except GivenUp as error:
                        return Verdict(_status(error.reason), detail=f"episode: {error}")
                    except EmptyTrajectory as error:
                        return Verdict("invalid" if policy.said else "error", detail=f"episode: {error}")
                    except Exception as error:
                        failure = in_words(error, self._function.place)
        except TimeoutError:
            if not deadline.expired():
                raise
            return Verdict("timeout", detail=f"episode: longer than episode.timeout_s {config.timeout_s:g}")
        return Verdict("error", detail=f"episode: {failure}")


def _status(reason: str) -> Status:
    return "timeout" if reason == "timeout" else "invalid" if reason == "invalid" else "error"
