"""Held-out problems, and what a version makes of them: generate, score, count."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import structlog

from actors import clock
from actors.reward.verdict import RewardRequest, Verdict
from actors.rollout.engine import ContextTooLongError, Engine, InvalidRequestError, Request, Sampling
from schemas import Evaluation

log = structlog.get_logger()

ROUND = 4096  # problems in flight
FAILURES_TOLD = 3  # of one evaluation, in the log


class Pool(Protocol):
    """What scores answers; `actors.reward.pool.RewardPool` is it."""

    async def score(self, request: RewardRequest) -> Verdict:
        """Score one sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A held-out row: its prompt, the prompt's tokens, and what the reward function gets besides."""

    prompt: str | list[dict[str, Any]]
    tokens: tuple[int, ...]
    task: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What became of a problem: its verdict, whether the answer ended by itself, and its length in tokens."""

    verdict: Verdict
    finished: bool
    length: int


Ask: TypeAlias = Callable[[int, Problem], Coroutine[Any, Any, Asked]]


class Episodes(Protocol):
    """How problems are asked in several turns; `actors.evaluator.episodes.Episodes` is it."""

    async def start(self) -> None:
        """Before the first evaluation."""

    async def close(self) -> None:
        """After the last one."""

    def asking(self, engine: Engine, pool: Pool, version: int) -> contextlib.AbstractAsyncContextManager[Ask]:
        """What asks problem k of an engine that holds `version`, and has the answer scored."""


class HeldOut:
    """The problems of one evaluation set, named `data` as in the recipe. Asked again, they are asked alike.

    `sampling.temperature` 0 takes the likeliest tokens; else problem k is drawn with the seed k in every evaluation.
    Without `episodes` each problem is answered once. `start` comes before the first evaluation, `close` after the last.
    """

    def __init__(
        self,
        data: str,
        problems: Sequence[Problem],
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
        episodes: Episodes | None = None,
    ) -> None:
        self.data = data
        self.problems = problems
        self.sampling = sampling
        self.decode = decode
        self.episodes = episodes

    async def start(self) -> None:
        """Start what episodes need. Raises `UserError` where they cannot work."""
        if self.episodes is not None:
            await self.episodes.start()

    async def close(self) -> None:
        """End it."""
        if self.episodes is not None:
            await self.episodes.close()

    async def evaluate(self, engine: Engine, pool: Pool, version: int, worker: str = "") -> Evaluation:
        """Ask `engine`, which holds `version`, all problems and score the answers.

        A problem without a verdict `scored` is counted by its verdict and is in no mean. Raises `RuntimeError` if the
        engine holds another version.
        """
        started_s = clock.monotonic_s()
        answers: list[Asked] = []
        problems = list(enumerate(self.problems))
        async with contextlib.AsyncExitStack() as stack:
            ask: Ask = functools.partial(self._ask, engine, pool, version)
            if self.episodes is not None:
                ask = await stack.enter_async_context(self.episodes.asking(engine, pool, version))
            for first in range(0, len(problems), ROUND):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(ask(k, problem)) for k, problem in problems[first : first + ROUND]]
                answers.extend(task.result() for task in tasks)
        scored = [answer.verdict for answer in answers if answer.verdict.reward is not None]
        failures = [answer.verdict for answer in answers if answer.verdict.reward is None]
        for verdict in failures[:FAILURES_TOLD]:
            log.warning("evaluation_without_verdict", version=version, verdict=verdict.status, detail=verdict.detail)
        return Evaluation(
            version=version,
            data=self.data,
            reward=_mean([verdict.reward for verdict in scored if verdict.reward is not None]) if scored else None,
            parts=_means(scored),
            count=len(answers),
            verdicts=dict(Counter(answer.verdict.status for answer in answers)),
            finished=_mean([float(answer.finished) for answer in answers]),
            response_length=_mean([float(answer.length) for answer in answers]),
            greedy=self.sampling.temperature == 0.0,
            seconds=clock.monotonic_s() - started_s,
            worker=worker,
        )

    async def _ask(self, engine: Engine, pool: Pool, version: int, k: int, problem: Problem) -> Asked:
        name = f"eval-{k}"
        try:
            generation = await engine.generate(Request(name, problem.tokens, self.sampling, seed=k))
        except (ContextTooLongError, InvalidRequestError) as error:
            return Asked(Verdict("error", detail=f"the prompt cannot be generated from: {error}"), False, 0)
        if generation.finish is None or any(made_by != version for made_by, _ in generation.segments):
            raise RuntimeError(f"version {version} was to answer problem {k}; it was {generation.segments}")
        text = self.decode(generation.tokens)
        verdict = await pool.score(
            RewardRequest(name, problem.prompt, text, generation.finish, problem.task, generation.tokens)
        )
        return Asked(verdict, generation.finish == "stop", len(generation.tokens))


def _means(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean of each named part over the verdicts that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            values[name].append(value)
    return {name: _mean(these) for name, these in sorted(values.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
