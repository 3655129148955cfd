"""One sample's session: what an agent asked, what it was answered, and what it earned.

A question is put to the policy in a task of the session's own, so that an agent that hangs up and asks again finds it,
and the log stays right whoever listens. Everything here can be made again from the log: see `restore`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from actors import clock
from actors.episode.encoding import Encoding
from actors.episode.endpoint.errors import ApiError, bad
from actors.episode.endpoint.formats import Reading
from actors.episode.endpoint.messages import digest, fingerprint, kept, read_kept
from actors.episode.endpoint.prompt_text import ChatTokenizer
from actors.episode.endpoint.tree import Node, Tree
from actors.episode.exchange import OnTokens
from actors.episode.policy import Bound
from schemas import Answer, MalformedMessage, Note

Notes: TypeAlias = Callable[[str, float | None, tuple[int, int] | None, str], Awaitable[None]]


class Policy(Protocol):
    """What a session asks of the model; `actors.episode.policy.Policy` is it."""

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        n: int = 1,
        on_tokens: OnTokens | None = None,
        context: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """`n` answers to a prompt. Raises `Bound`."""

    def skip(self) -> None:
        """Leave out the number of a question that was refused before it came to the log."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: a whole prompt, the answer that it goes on from, and how the answer is to be read.

    `known` is what the conversation is known by, `new` are its messages behind the parent, `text` is a prompt of text.
    """

    prompt_tokens: tuple[int, ...]
    parent: Node | None
    known: str
    new: list[dict[str, Any]]
    text: str
    max_new_tokens: int
    stop: tuple[str, ...]
    n: int
    tools: bool
    stream: bool = False

    @property
    def same(self) -> str:
        """Equal for a question that is repeated; its bound is left out, which the policy may have lowered."""
        return digest([list(self.prompt_tokens), list(self.stop), self.n])


@dataclass(frozen=True, slots=True)
class Recorded:
    """A question as the log has it; `answered` if all its answers are there too."""

    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...]
    n: int
    context: dict[str, Any]
    answered: bool


@dataclass(eq=False)
class Exchange:
    """A question and its answers, as far as they have come. `made[c]` are tokens and logprobs of choice c."""

    number: int
    question: Question
    made: list[tuple[list[int], list[float]]]
    task: asyncio.Task[list[Node]] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    heard: bool = False  # its answers were given to the agent
    listeners: int = 0  # requests that wait for its answers

    def take(self, choice: int, start: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens have come. Some may be missing before them, then they wait for the answer; some may be known."""
        made = self.made[choice]
        if not 0 <= start <= len(made[0]) < start + len(tokens):
            return
        new = len(made[0]) - start
        made[0].extend(tokens[new:])
        made[1].extend(logprobs[new:])
        self.changed.set()
        self.changed = asyncio.Event()

    async def begun(self) -> None:
        """Wait for the first token. Raises what the question raised."""
        assert self.task is not None
        while not self.task.done() and not any(tokens for tokens, _ in self.made):
            waiting = asyncio.ensure_future(self.changed.wait())
            try:
                await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        if self.task.done():
            self.task.result()

    def hear(self) -> None:
        """The agent has got the answers: they belong to the trajectory."""
        self.heard = True
        if self.task is not None and self.task.done():
            for node in self.task.result():
                node.heard = True

    async def nodes(self) -> list[Node]:
        """The answers; waiting may be cancelled, the question goes on."""
        assert self.task is not None
        return await asyncio.shield(self.task)

    async def pieces(self) -> AsyncIterator[tuple[int, list[int], list[float]]]:
        """`(choice, tokens, logprobs)` as they come, to the last of the answers. Raises what the question raised."""
        assert self.task is not None
        given = [0] * len(self.made)
        while True:
            changed, done = self.changed, self.task.done()
            if done:
                for node in self.task.result():
                    answer = node.answer
                    made = self.made[node.choice]
                    if made[0][: given[node.choice]] != answer.tokens.tolist()[: given[node.choice]]:
                        raise ApiError(502, "The answer was made anew, otherwise than it had begun. Ask again.")
                    made[0][:], made[1][:] = answer.tokens.tolist(), answer.logprobs.tolist()
            for choice, (tokens, logprobs) in enumerate(self.made):
                if len(tokens) > given[choice]:
                    start, given[choice] = given[choice], len(tokens)
                    yield choice, tokens[start:], logprobs[start:]
            if done:
                return
            waiting = asyncio.ensure_future(changed.wait())
            try:
                await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()


class Session:
    """An agent's conversation with the policy on behalf of one sample.

    `task` is what an external agent is told with its key. `notes` puts on the log what no turn tells; without it the
    agent is one that begins anew with its worker, and says everything again. `touched_s` is when it was last heard of.
    """

    def __init__(
        self,
        key: str,
        sample_id: str,
        policy: Policy,
        tokenizer: ChatTokenizer,
        encoding: Encoding,
        task: dict[str, Any] | None = None,
        notes: Notes | None = None,
    ) -> None:
        self.key = key
        self.sample_id = sample_id
        self.policy = policy
        self.tokenizer = tokenizer
        self.encoding = encoding
        self.task = task or {}
        self.tree = Tree()
        self._notes = notes
        self.reward: float | None = None
        self.bound = ""  # which it has come to
        self.cut = False  # by a bound, and nothing that was asked since was answered
        self._bound_at = -1  # the question that was the newest then
        self.dropped = ""  # why it shall not be trained
        self.ended = asyncio.Event()
        self.taken = False
        self.touched_s = clock.monotonic_s()
        self.open = 0  # requests in flight
        self._numbers = itertools.count()
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._exchanges: list[Exchange] = []
        self._by_id: dict[str, Exchange] = {}
        self._restored: list[Exchange] = []  # of an earlier life; whoever asks the same again finds them, once each

    @property
    def id(self) -> str:
        """What the session is called; unlike the key no secret."""
        return f"session-{self.sample_id}"

    def response_id(self, number: int) -> str:
        """The id of the response to the `number`-th question, without its prefix; the same in every life."""
        return digest([self.key, number])

    def exchange_of(self, response_id: str) -> Exchange:
        """The exchange that a response id names, whatever the prefix. Raises `ApiError`."""
        found = self._by_id.get(response_id.partition("-" if "-" in response_id else "_")[2])
        if found is None:
            raise ApiError(404, f"The session has no response {response_id!r}.", param="response_id")
        return found

    def ask(self, question: Question, again: bool) -> Exchange:
        """Put a question; `again`: the client has sent it before and got nothing, so that it joins what is there.

        Raises `ApiError` if the session has ended.
        """
        self._check_open()
        known = self._restored + (self._unused() if again else [])
        for exchange in known:
            if exchange.question.same == question.same:
                if exchange in self._restored:
                    self._restored.remove(exchange)
                return exchange
        return self._begun(question)

    def _unused(self) -> list[Exchange]:
        """Questions on whose answers nothing was built; those first for whose answers nobody waits and that nobody
        got, then the newest."""
        built_on = {e.question.parent.number for e in self._exchanges if e.question.parent is not None}
        unused = (e for e in self._exchanges if e.number not in built_on)
        return sorted(unused, key=lambda e: (e.listeners > 0, e.heard, -e.number))

    def _begun(self, question: Question, context: dict[str, Any] | None = None) -> Exchange:
        exchange = Exchange(next(self._numbers), question, [([], []) for _ in range(question.n)])
        if question.parent is not None:
            question.parent.heard = True  # it goes on from it, so the agent has it, even if it hung up on the rest
        self._exchanges.append(exchange)
        self._by_id[self.response_id(exchange.number)] = exchange
        exchange.task = asyncio.create_task(
            self._answered(exchange, context or self._context(question)), name=f"{self.id} asks {exchange.number}"
        )
        exchange.task.add_done_callback(_seen)
        return exchange

    def _context(self, question: Question) -> dict[str, Any]:
        """What the log is told of a question beside its tokens, so that a session can be made again from it."""
        parent = question.parent
        return {
            "parent": [parent.number, parent.choice] if parent is not None else [],
            "known": question.known,
            "messages": [kept(message) for message in question.new],
            "text": question.text[len(parent.text) if parent is not None else 0 :],
            "tools": question.tools,
        }

    async def restore(self, recorded: Sequence[Recorded | None], notes: Sequence[Note]) -> None:
        """Go on from where an earlier life came to: what it asked, in order, None where a number is missing. The log
        answers again."""
        for asked in recorded:
            if asked is None:
                next(self._numbers)
                self.policy.skip()
                continue
            place = asked.context.get("parent") or []
            parent = self.tree.at(*place) if place else None
            question = Question(
                prompt_tokens=asked.prompt_tokens,
                parent=parent,
                known=str(asked.context.get("known", "")),
                new=[read_kept(message) for message in asked.context.get("messages", ())],
                text=(parent.text if parent is not None else "") + str(asked.context.get("text", "")),
                max_new_tokens=asked.max_new_tokens,
                stop=asked.stop,
                n=asked.n,
                tools=bool(asked.context.get("tools")),
            )
            exchange = self._begun(question, asked.context)
            self._restored.append(exchange)
            if asked.answered:  # those that were not are asked of the workers, and nobody waits for them here
                with contextlib.suppress(ApiError):  # refused then, as now
                    await exchange.nodes()
                    exchange.hear()
        for note in notes:
            self._replay(note)

    def _replay(self, note: Note) -> None:
        match note.kind:
            case "taken":
                self.taken = True
            case "reward" if note.turn < 0:
                self.reward = note.value
            case "reward":
                node = self.tree.at(note.turn, note.choice)
                if node is not None:
                    node.earn(note.value or 0.0)
            case "end":
                self.reward = self.reward if note.value is None else note.value
                self.dropped = note.detail
                self.ended.set()

    async def _answered(self, exchange: Exchange, context: dict[str, Any]) -> list[Node]:
        question = exchange.question
        try:
            answers = await self.policy.generate(
                question.prompt_tokens,
                max_new_tokens=question.max_new_tokens,
                stop=question.stop,
                n=question.n,
                on_tokens=exchange.take if question.stream else None,
                context=context,
            )
        except Bound as bound:
            self.bound, self.cut, self._bound_at = str(bound), True, self._exchanges[-1].number
            raise bad(f"The session has come to a bound: {bound}.", code="context_length_exceeded") from None
        except MalformedMessage as error:
            raise bad(f"The request cannot be kept on the log: {error.reason}.") from None
        if exchange.number > self._bound_at:  # asked since, and answered: the agent has made room
            self.cut = False
        return [self._node(exchange, choice, answer) for choice, answer in enumerate(answers)]

    def _node(self, exchange: Exchange, choice: int, answer: Answer) -> Node:
        question = exchange.question
        reading = Reading(self.tokenizer.decode, question.stop, question.tools)
        reading.push(answer.tokens.tolist(), answer.logprobs.tolist())
        reading.end()
        message: dict[str, Any] = {"role": "assistant", "content": reading.content}
        if reading.calls:
            message["tool_calls"] = [
                {
                    "id": self.call_id(exchange.number, choice, i),
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for i, call in enumerate(reading.calls)
            ]
        return self.tree.add(
            Node(
                exchange.number,
                choice,
                question.prompt_tokens,
                answer,
                question.parent,
                message,
                fingerprint(question.known, message) if question.known else "",
                question.text + reading.content if question.text else "",
                question.new,
            )
        )

    def call_id(self, number: int, choice: int, i: int) -> str:
        """The id of a tool call, the same in every life."""
        return f"call_{digest([self.key, number, choice, i])[:24]}"

    # ---- what was earned

    def node_of(self, response_id: str, choice: int) -> Node:
        """The answer with this id. Raises `ApiError`."""
        exchange = self.exchange_of(response_id)
        node = self.tree.at(exchange.number, choice)
        if node is None:
            raise ApiError(404, f"The response {response_id!r} has no choice {choice}.", param="choice")
        return node

    async def earn(self, reward: float, node: Node | None) -> None:
        """Take a reward for one answer, or for the session. Raises `ApiError`."""

        async def earn() -> None:
            self._check_open()
            if node is None:
                await self._note("reward", reward)
                self.reward = reward
            else:
                await self._note("reward", reward, (node.number, node.choice))
                node.earn(reward)

        await self._whole(earn)

    async def take(self) -> None:
        """An external agent has it now. Raises `ApiError`."""

        async def take() -> None:
            self._check_open()
            await self._note("taken")
            self.taken = True
            self.touch()

        await self._whole(take)

    async def end(self, reward: float | None = None, drop: str = "") -> None:
        """It is over. A second end changes nothing."""

        async def end() -> None:
            if self.ended.is_set():
                return
            await self._note("end", reward, detail=drop)
            if reward is not None:
                self.reward = reward
            self.dropped = drop
            self.ended.set()

        await self._whole(end)

    async def _whole(self, change: Callable[[], Awaitable[None]]) -> None:
        """Make a change, one after the other, and to its end even if who asked for it hangs up: what is on the log and
        what is here stay the same."""

        async def alone() -> None:
            async with self._writing:
                await change()

        task = asyncio.create_task(alone(), name=f"{self.id} notes")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        task.add_done_callback(_seen)
        await asyncio.shield(task)

    def touch(self) -> None:
        """It was heard of now."""
        self.touched_s = clock.monotonic_s()

    def _check_open(self) -> None:
        if self.ended.is_set():
            raise ApiError(409, "The session has ended.", code="session_ended")
        self.touch()

    async def _note(
        self, kind: str, value: float | None = None, place: tuple[int, int] | None = None, detail: str = ""
    ) -> None:
        if self._notes is not None:
            await self._notes(kind, value, place, detail)

    async def close(self) -> None:
        """Ask nothing more."""
        self.ended.set()
        asked = [e.task for e in self._exchanges if e.task is not None and not e.task.done()]
        tasks: list[asyncio.Task[Any]] = [*asked, *self._writes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seen(task: asyncio.Task[Any]) -> None:
    """A question that fails while nobody listens is no news: it fails again for who asks again."""
    if not task.cancelled():
        task.exception()
