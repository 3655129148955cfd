"""Held-out problems, and what a version makes of them: generate, score, count."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
class _Answer:
    verdict: Verdict
    finished: bool
    length: int


class HeldOut:
    """The problems of one evaluation set, named `data` as in the recipe. Asked again, they are asked alike.

    `sampling.temperature` 0 takes the likeliest tokens; else problem k is drawn with the seed k in every evaluation.
    """

    def __init__(
        self, data: str, problems: Sequence[Problem], sampling: Sampling, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.data = data
        self.problems = problems
        self.sampling = sampling
        self.decode = decode

    async def evaluate(self, engine: Engine, pool: Pool, version: int, worker: str = "") -> Evaluation:
        """Ask `engine`, which holds `version`, all problems and score the answers.

        A problem without a verdict `scored` is counted by its verdict and is in no mean. Raises `RuntimeError` if the
        engine holds another version.
        """
        started_s = clock.monotonic_s()
        answers: list[_Answer] = []
        for first in range(0, len(self.problems), ROUND):
            asked = range(first, min(first + ROUND, len(self.problems)))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(engine, pool, version, k)) for k in asked]
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

    async def _ask(self, engine: Engine, pool: Pool, version: int, k: int) -> _Answer:
        problem, name = self.problems[k], f"eval-{k}"
        try:
            generation = await engine.generate(Request(name, problem.tokens, self.sampling, seed=k))
        except (ContextTooLongError, InvalidRequestError) as error:
            return _Answer(Verdict("error", detail=f"the prompt cannot be generated from: {error}"), False, 0)
        if generation.finish is None or any(made_by != version for made_by, _ in generation.segments):
            raise RuntimeError(f"version {version} was to answer problem {k}; it was {generation.segments}")
        text = self.decode(generation.tokens)
        verdict = await pool.score(
            RewardRequest(name, problem.prompt, text, generation.finish, problem.task, generation.tokens)
        )
        return _Answer(verdict, generation.finish == "stop", len(generation.tokens))


def _means(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean of each named part over the verdicts that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            values[name].append(value)
    return {name: _mean(these) for name, these in sorted(values.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
