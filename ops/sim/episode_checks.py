"""Holds the episodes of a simulated run to their promises, at each entry that the log stores and once more at the end.

An episode is a pure function of its answers (`ops.sim.episodes`), so its way is gone again with those in the log: each
turn must be the next on it, and a rollout the whole of it, put together anew by plain lists. Of several answers to one
turn the first counts, for every life of the episode.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

from bus.port import Entry
from ops.sim.episodes import TEXT, End, Question, Said, next_of
from ops.sim.fakes import CONTEXT_MAX, asked_of, length_of
from ops.sim.scenario import kind_of
from ops.sim.world import World
from schemas import Answer, Dropped, Partial, Prompt, Rollout, Turn
from schemas.trajectory import model_tokens

Key: TypeAlias = tuple[int, int]  # (group id, index) of a sample
TrueTokens: TypeAlias = Callable[[str, Rollout | Answer | Partial, str, int], None]
Asked: TypeAlias = list[tuple[Question, list[Answer]]]


@dataclasses.dataclass(slots=True)
class _Sequence:
    """A sequence of a trajectory, token by token. `versions` are None at observations."""

    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int | None] = dataclasses.field(default_factory=list)
    turns: list[str] = dataclasses.field(default_factory=list)


class EpisodeChecker:
    """What `prompts` were admitted and how samples were `dropped` so far, the checker of the whole run knows."""

    def __init__(
        self, world: World, prompts: Mapping[Key, Prompt], dropped: Mapping[Key, str], true_tokens: TrueTokens
    ) -> None:
        self.turns: dict[str, Turn] = {}
        self.answers: dict[str, Answer] = {}  # the first to each turn
        self._world = world
        self._scenario = world.scenario
        self._prompts = prompts
        self._dropped = dropped
        self._true_tokens = true_tokens
        self._answered_s: dict[str, float] = {}
        self._at: defaultdict[str, list[str]] = defaultdict(list)  # place in an episode -> ids of turns
        self._place_of: dict[tuple[Key, int], str] = {}  # by seed

    def _hold(self, invariant: str, promise: bool, what: str) -> None:
        if not promise:
            self._world.violate(invariant, what)

    # ---- the way of an episode

    def _most(self, question: Question) -> int:
        """Tokens that an answer may have; less than 1: the episode is cut."""
        most = min(question.most or self._scenario.max_new_tokens, self._scenario.max_new_tokens)
        room = self._scenario.max_tokens
        return most if room is None else min(most, room - len(question.tokens))

    def _asks(self, turn: Turn, question: Question) -> bool:
        return (
            tuple(turn.prompt_tokens.tolist()) == question.tokens
            and turn.choice < question.n
            and turn.max_new_tokens == self._most(question)
            and tuple(turn.stop) == question.stop
        )

    def _way(self, prompt: Prompt, attempt: int) -> tuple[Asked, Question | End | None]:
        """What was asked and answered, and what comes next: a question, an end, or None where the episode is cut."""
        said: Asked = []
        while isinstance(step := next_of(prompt, said), Question):
            if len(said) >= self._scenario.max_turns or self._most(step) < 1:
                return said, None
            answers = self._answers_to(prompt, attempt, len(said), step)
            if len(answers) < step.n:
                return said, step
            if any(answer.error for answer in answers):
                return said, None
            said.append((step, answers))
        return said, step

    def _answers_to(self, prompt: Prompt, attempt: int, number: int, question: Question) -> list[Answer]:
        return [
            self.answers[turn]
            for choice in range(question.n)
            for turn in self._at.get(f"{prompt.sample_id}/{attempt}-{number}-{choice}", ())
            if turn in self.answers and self._asks(self.turns[turn], question)
        ]

    # ---- entries

    def turn(self, entry: Entry, turn: Turn) -> None:
        """A turn was stored."""
        prompt = self._prompts.get((turn.group_id, turn.index))
        if prompt is None:
            self._world.violate("log", f"turn {turn.id} is of a sample that was never admitted")
            return
        if turn.id in self.turns:
            self._world.count("a turn was asked again")
            return
        said, step = self._way(prompt, turn.attempt)
        next_one = isinstance(step, Question) and turn.number == len(said) and self._asks(turn, step)
        self._hold("turns", next_one, f"turn {turn.id} is not what the episode asks after {len(said)} answers")
        self._hold("turns", turn.min_version == prompt.min_version, f"turn {turn.id} asks for other versions")
        place = self._place_of.setdefault(((turn.group_id, turn.index), turn.seed), turn.place)
        self._hold("turns", place == turn.place, f"turns {place} and {turn.place} have one seed")
        again = turn.attempt > 0 and self._scenario.replayable
        self._hold("turns", not again, f"turn {turn.id} is another attempt at what can be repeated")
        self.turns[turn.id] = turn
        self._at[turn.place].append(turn.id)

    def answer(self, entry: Entry, answer: Answer) -> None:
        """An answer was stored."""
        turn = self.turns.get(answer.turn)
        if turn is None:
            self._world.violate("log", f"the answer to {answer.turn} is to what was never asked")
            return
        if answer.error:
            self._world.count("a turn was refused")
            self._hold("turns", len(turn.prompt_tokens) > CONTEXT_MAX, f"turn {turn.id} is refused: {answer.error}")
        else:
            asked = asked_of(turn.seed, turn.prompt_tokens.tolist())
            self._true_tokens(f"answer {turn.id}", answer, asked, turn.min_version)
            self._length(turn, answer)
        if answer.turn in self.answers:
            self._world.count("a second answer to a turn")
            return
        self.answers[answer.turn] = answer
        self._answered_s[answer.turn] = self._world.loop.time()

    def _length(self, turn: Turn, answer: Answer) -> None:
        """An answer ends at the first string that ends it, by itself, or at its bound."""
        whole = min(length_of(turn.seed, self._scenario.mean_tokens), turn.max_new_tokens)
        tokens = answer.tokens.tolist()
        ends = [n for n in range(1, len(tokens) + 1) if any(stop in TEXT.decode(tokens[:n]) for stop in turn.stop)]
        if not ends:
            self._hold("turns", len(tokens) == whole, f"the answer to {turn.id} ends after {len(tokens)} tokens")
            return
        self._world.count("an answer ended at a string")
        sound = ends == [len(tokens)] and len(tokens) <= whole and answer.stopped in turn.stop
        self._hold("turns", sound, f"the answer to {turn.id} has {len(tokens)} tokens, a string ends it at {ends[0]}")

    def rollout(self, rollout: Rollout) -> None:
        """A rollout was stored: it must be the whole way, and nothing else."""
        prompt = self._prompts[rollout.group_id, rollout.index]
        first = self.turns.get(rollout.turns[0]) if rollout.turns else None
        if first is None:
            self._world.violate("turns", f"{rollout.sample_id} is made of no turn")
            return
        said, step = self._way(prompt, first.attempt)
        over = step is None or (isinstance(step, End) and not step.given_up)
        self._hold("turns", over and bool(said), f"{rollout.sample_id} is stored, its episode would go on: {step}")
        want = self._put_together(said)
        observed = ~model_tokens(rollout.observations, len(rollout.tokens))
        versions = [version for version, count in rollout.segments for _ in range(count)]
        for what, told, sound in (
            ("prompts", rollout.prompt_tokens.tolist(), [token for one in want for token in one.prompt]),
            ("tokens", rollout.tokens.tolist(), [token for one in want for token in one.tokens]),
            ("logprobs", rollout.logprobs.tolist(), [logprob for one in want for logprob in one.logprobs]),
            ("observations", observed.tolist(), [version is None for one in want for version in one.versions]),
            (
                "versions",
                [None if told else version for told, version in zip(observed.tolist(), versions, strict=True)],
                [version for one in want for version in one.versions],
            ),
            ("turns", rollout.turns, [turn for one in want for turn in one.turns]),
            (
                "sequences",
                rollout.sequences.tolist(),
                [count for one in want for count in (len(one.prompt), len(one.tokens))] if len(want) > 1 else [],
            ),
            ("reward", rollout.reward, step.reward if isinstance(step, End) else None),
            ("finish", rollout.finish, said[-1][1][-1].finish if isinstance(step, End) else "length"),
        ):
            self._hold("turns", told == sound, f"the {what} of {rollout.sample_id} are not those of its answers")
        for situation, reached in (
            ("an episode of several sequences", len(want) > 1),
            ("an episode with observations", bool(observed.any())),
            ("an episode was cut at its bounds", step is None),
        ):
            if reached:
                self._world.count(situation)

    def _put_together(self, said: Said) -> list[_Sequence]:
        out: list[_Sequence] = []
        for question, answers in said:
            asked = list(question.tokens)
            for answer in answers:
                before = [one for one in out if asked[: len(one.prompt) + len(one.tokens)] == one.prompt + one.tokens]
                if before and not self._scenario.per_turn:
                    one = max(before, key=lambda one: len(one.prompt) + len(one.tokens))
                else:
                    out.append(one := _Sequence(asked))
                told = asked[len(one.prompt) + len(one.tokens) :]
                one.tokens += told + answer.tokens.tolist()
                one.logprobs += [0.0] * len(told) + answer.logprobs.tolist()
                one.versions += [None] * len(told)
                one.versions += [version for version, count in answer.segments for _ in range(count)]
                one.turns.append(answer.turn)
        return out

    def drop(self, dropped: Dropped) -> None:
        """A sample was dropped; if by its episode, for a reason that there is."""
        prompt = self._prompts.get((dropped.group_id, dropped.index))
        if prompt is None or not dropped.detail.startswith("episode: "):
            return
        name = dropped.sample_id
        if dropped.reason == "error":
            due = "episode_fails" in map(kind_of, self._world.struck)
        else:
            attempts = {turn.attempt for turn in self.turns.values() if turn.sample_id == name}
            steps = [self._way(prompt, attempt)[1] for attempt in attempts]
            due = dropped.reason == "filtered" and any(isinstance(step, End) and step.given_up for step in steps)
        self._hold("I2", due, f"{name} is dropped without need, {dropped.reason}: {dropped.detail}")

    # ---- asked by others

    def settled(self, turn: str, sample: Key) -> bool:
        """Whether nobody needs to answer a turn any more."""
        return turn in self.answers or turn not in self.turns or sample in self._dropped

    def answered_s(self, prompt: Prompt, number: int, n: int) -> float | None:
        """See `ops.sim.episodes.Watches`."""
        stored_s = []
        for choice in range(n):
            turns = self._at.get(f"{prompt.sample_id}/0-{number}-{choice}", ())
            stored_s += [self._answered_s[turn] for turn in turns[:1] if turn in self._answered_s]
        return max(stored_s) if self._scenario.replayable and len(stored_s) == n else None

    def told(self, prompt: Prompt, answer: Answer, tokens: dict[int, int]) -> None:
        """See `ops.sim.episodes.Watches`. Where two workers made the answer, the other's tokens may have been told."""
        made = dict(enumerate(answer.tokens.tolist()))
        same = [made[at] == token for at, token in tokens.items() if at in made]
        if same:
            self._world.count("an episode was told of tokens while they were made")
        if not all(same):
            self._world.count("tokens were told that the answer does not have")
        kept = all(same) or bool(self._world.struck)
        self._hold("turns", kept, f"of the answer to {answer.turn} other tokens were told than it has")

    def finish(self, trained: Mapping[Key, int]) -> None:
        """The run is over: what was asked was answered, or its sample has ended otherwise."""
        for turn in self.turns.values() if self._scenario.replayable else ():
            open_ = (turn.group_id, turn.index) in trained and turn.id not in self.answers
            self._hold("turns", not open_, f"turn {turn.id} was never answered, and its sample trained")
