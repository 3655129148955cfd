"""Runs the user's reward function in processes that can be killed, and turns whatever happens into a verdict."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from actors.reward.config import RewardConfig
from actors.reward.frames import REQUEST_BYTES_MAX, pack
from actors.reward.process import ChildLost, ChildSilent, RewardProcess
from actors.reward.steps import Decode, place
from actors.reward.throttle import open_shared
from actors.reward.verdict import RewardRequest, Verdict
from schemas.errors import UserError

START_ATTEMPTS = 3


class PoolClosed(Exception):
    """The pool was closed before the request was answered; there is no verdict, and none must be recorded."""


class RewardPool:
    """At most `config.children` processes, each started when first needed and asked one thing at a time.

    Further requests wait, in the order in which they came. `base` is the recipe's folder, where relative paths start.
    `decoder` gives the model's decoding of tokens, which only a function that rewards steps by characters needs;
    without it such rewards are left out, for those who have no use for them.
    """

    def __init__(
        self, config: RewardConfig, base: Path | None = None, decoder: Callable[[], Decode] | None = None
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._base = base
        self._slots = asyncio.Semaphore(config.children)  # wakes its waiters in order
        self._idle: list[RewardProcess] = []
        self._alive: set[RewardProcess] = set()
        self._sources: dict[str, bytes] = {}
        self._generation = 0
        self.digest = ""
        """Of the function as it is loaded now."""
        self._shared = open_shared()
        self._closed = False

    async def start(self) -> None:
        """Start one child, so that a function that cannot be loaded is known at once. Raises `UserError`."""
        async with self._slots:
            await self._load()

    async def reload(self) -> str:
        """Load the function from its files as they are now, for all calls from now on; returns its digest.

        Calls under way end with the function that they began with. Raises `UserError` if it cannot be loaded: the old
        one stays, with the code that it was loaded with, in processes that are started later, too.
        """
        await self._load()
        return self.digest

    async def _load(self) -> None:
        """Have a child that runs the files as they are now; those before it are not asked again."""
        remedy = "Mend what it does when it is imported, or raise reward.start_timeout_s."
        try:
            child = await self._first_child()
        except ChildLost as error:
            message = f"The process that loads the reward function '{self._config.function}' ended: {error}."
            raise UserError(message, remedy) from error
        except ChildSilent as error:
            limit = f"{self._config.start_timeout_s:g} s"
            message = f"Loading the reward function '{self._config.function}' took more than {limit}."
            raise UserError(message, remedy) from error
        self._generation += 1
        child.generation = self._generation
        old, self._idle = self._idle, [child]
        self.digest, self._sources = child.digest, child.sources
        await asyncio.gather(*(self._discard(one) for one in old))

    async def score(self, request: RewardRequest) -> Verdict:
        """Score one sample: call the function until it answers, at most `1 + retries` times.

        Every failure is a verdict; nothing is raised but `PoolClosed`. If the caller is cancelled, the call is killed.
        """
        async with self._slots:
            attempt = 0
            while True:
                attempt += 1
                verdict = await self._attempt(request)
                if verdict.token_rewards or verdict.steps:
                    verdict = await asyncio.to_thread(self._placed, verdict, request)
                if verdict.status in ("scored", "invalid") or attempt > self._config.retries:
                    return replace(verdict, attempts=attempt) if attempt > 1 else verdict

    def _placed(self, verdict: Verdict, request: RewardRequest) -> Verdict:
        """The verdict with its process rewards on the reply's tokens; invalid if they do not fit."""
        tokens = request.tokens or ()
        given = len(verdict.token_rewards)
        try:
            if not verdict.steps:
                if given != len(tokens):
                    raise ValueError(f"token_rewards has {given} numbers for {len(tokens)} tokens")
                return verdict
            if self._decoder is None:
                return replace(verdict, steps=())
            first, end = request.turn or (0, len(tokens))
            of_turn, ends = place(verdict.steps, tokens[first:end], request.response, self._decoder())
        except ValueError as error:
            return Verdict("invalid", detail=str(error), seconds=verdict.seconds, digest=verdict.digest)
        rewards = (*([0.0] * first), *of_turn, *([0.0] * (len(tokens) - end)))
        return replace(verdict, token_rewards=rewards, steps=(), step_ends=tuple(first + at for at in ends))

    async def close(self) -> None:
        """Kill all children, with whatever they are doing; requests not yet answered raise `PoolClosed`."""
        self._closed = True
        await asyncio.gather(*(self._discard(child) for child in list(self._alive)))
        for _ in range(self._config.children):  # the requests under way, and those that wait, find the pool closed
            await self._slots.acquire()
        for _ in range(self._config.children):
            self._slots.release()
        if self._shared >= 0:
            os.close(self._shared)
            self._shared = -1

    async def _attempt(self, request: RewardRequest) -> Verdict:
        config = self._config
        if self._closed:
            raise PoolClosed
        child = None
        try:
            child = await self._idle_child() or await self._new_child(self._sources)
            try:
                body = pack({name: getattr(request, name) for name in child.keywords})
                if len(body) > REQUEST_BYTES_MAX:
                    raise ValueError(f"{len(body)} bytes exceed the limit of {REQUEST_BYTES_MAX}")
            except (TypeError, ValueError, OverflowError) as error:
                verdict = Verdict("error", detail=f"the sample cannot be sent to the reward function: {error}")
            else:
                verdict = await child.ask(body, config.timeout_s)
            verdict = replace(verdict, digest=child.digest)
            if child.generation == self._generation:
                self._idle.append(child)
                child = None
            return verdict
        except ChildSilent as error:
            seconds = config.timeout_s if child else config.start_timeout_s
            what = "the reward function gave no answer" if child else "the reward process did not start"
            last = f"; last output: {error}" if str(error) else ""
            verdict = Verdict("timeout", detail=f"{what} within {seconds:g} s{last}", seconds=seconds)
            return replace(verdict, digest=child.digest if child else self.digest)
        except (ChildLost, UserError) as error:
            if self._closed:
                raise PoolClosed from error
            digest = child.digest if child else self.digest
            return Verdict("error", detail=f"the reward process failed: {error}", digest=digest)
        finally:
            if child is not None:
                await self._discard(child)

    async def _first_child(self) -> RewardProcess:
        """A child, at the second or third attempt if need be: one that was killed from outside proves nothing."""
        for _ in range(START_ATTEMPTS - 1):
            with contextlib.suppress(ChildLost):
                return await self._new_child({})
        return await self._new_child({})

    async def _idle_child(self) -> RewardProcess | None:
        """A child that waits; those that were killed while they waited are no failure of the function."""
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            await self._discard(child)
        return None

    async def _new_child(self, sources: Mapping[str, bytes]) -> RewardProcess:
        child = await RewardProcess.spawn(self._config.function, self._base, self._shared)
        child.generation = self._generation
        self._alive.add(child)
        try:
            if self._closed:  # it was, while the process started
                raise PoolClosed
            await child.load(self._config, sources)
            if not self.digest:
                self.digest, self._sources = child.digest, child.sources
        except BaseException:
            await self._discard(child)
            raise
        return child

    async def _discard(self, child: RewardProcess) -> None:
        self._alive.discard(child)
        await child.kill()
