"""What one simulated run is made of, all of it drawn from one seed; printed as one line of JSON and read from one.

Swarm testing: each kind of fault is in a run or not at all, since a run in which everything fails at every moment never
gets to the states in which one rare fault does harm.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any, Final, Literal, TypeAlias, get_args

from schemas import UserError

OnStale: TypeAlias = Literal["mask", "drop", "wait"]
Filter: TypeAlias = Literal["none", "zero_variance"]
OnUpdate: TypeAlias = Literal["recompute", "keep", "drain"]

# Faults that strike at some time, by mean strikes a virtual second.
TIMED: Final[dict[str, str]] = {
    "kill": "kill -9 of a process, started again later",
    "power": "kill -9 of all processes and of the server",
    "term": "SIGTERM of a process, started again later",
    "stall": "SIGSTOP of a process, maybe with a successor beside it when it goes on",
    "partition": "a process that reaches the log no more for a while",
    "restart": "the server is killed: all connections lost, the last acknowledgements forgotten",
    "lease": "the server loses a lease, so that two controllers lead",
    "full": "a stream refuses; the operator makes room and resumes the run",
    "clock": "the wall clock of a process is set",
    "pause": "the user pauses the run and resumes it",
    "drain": "the user stops the run in order and resumes it",
    "garbage": "somebody stores bytes that are no message",
    "audit": "the user audits the run while it goes on",
}
# Faults that strike at a call, by probability.
AT_CALL: Final[dict[str, str]] = {
    "crash_before": "a process dies at a call to the log, before its effect",
    "crash_after": "a process dies at a call to the log, after its effect",
    "lost_answer": "the log does what was asked, its answer is lost",
    "slow_call": "a call to the log takes long",
    "lost_ack": "the acknowledgement of a delivery is lost",
    "duplicate": "a delivery is given out again at once",
    "reorder": "deliveries come in another order",
    "stale_read": "a lagging replica answers",
    "crash_at_disk": "a process dies in a thread, before or after its effect",
    "slow_disk": "a call in a thread takes long",
    "disk_full": "a write finds the disk full; the operator makes room and resumes the run",
    "torn_save": "a process dies in the midst of saving a checkpoint",
    "reward_fails": "the reward of a sample ends in a timeout, an error, or no number",
    "stop_at_write": "a process is stopped just before it stores a decision, and goes on later",
    "die_at_batch": "a process dies just after it stored a batch",
    "episode_fails": "the function of an episode raises",
}
FAULTS: Final = TIMED | AT_CALL


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One run: the recipe, the machines, what strikes.

    Times are virtual seconds, means of exponential draws where the world needs many. From `quiet_s` on nothing strikes
    any more. `faults` maps kinds to rates (see `TIMED`, `AT_CALL`). `only` names the single faults that may strike: as
    `"kill:3"`, the third of its kind, or `"lost_ack@rollout-0#2:1"`, the first in the second life of a process; None
    lets all.
    """

    seed: int
    steps: int = 4
    more_steps: int = 0  # for which the finished run is resumed
    max_staleness: int = 1
    batch_groups: int = 2
    group_size: int = 2
    on_stale: OnStale = "mask"
    filter: Filter = "none"
    pace: bool = True
    partial_every: int = 0
    slots: int = 4
    on_update: OnUpdate = "recompute"
    max_new_tokens: int = 24
    mean_tokens: int = 6
    checkpoint_every: int = 2
    keep_checkpoints: int = 2
    keep_versions: int = 2
    full_every: int = 1  # versions of which one is published in full
    overlap: bool = False  # publishing with the next step
    workers: int = 2
    rewarders: int = 1
    controllers: int = 1
    trainers: int = 1
    episodes: int = 0  # workers that run them; 0: each prompt is answered once
    at_once: int = 64  # episodes of one worker
    replayable: bool = True  # an episode that runs again takes the answers that it had
    per_turn: bool = False  # each turn is a sequence of its own
    max_turns: int = 16
    max_tokens: int | None = None  # of context and answer
    shared: bool = True  # controllers and reward workers in one process
    equal_share: float = 0.0  # of groups whose rewards are all equal
    token_s: float = 0.03
    reward_s: float = 0.1
    train_s: float = 0.2
    swap_s: float = 0.05
    network_s: float = 0.003
    disk_s: float = 0.01
    ack_wait_s: float = 3.0
    dedupe_window_s: float = 120.0
    deadline_s: float = 120.0  # of a request to the log
    restart_s: float = 0.5
    quiet_s: float = 20.0
    later: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields that are changed when the run is resumed
    faults: dict[str, float] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """One line; what is as by default is left out."""
        default = Scenario(self.seed)
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "seed" or getattr(self, field.name) != getattr(default, field.name)
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """The scenario in a line of JSON. Raises `UserError`."""
        remedy = "Copy the line that `rollstream sim` printed."
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.get("only") is not None:
                fields["only"] = tuple(fields["only"])
            scenario = cls(**fields)
            dataclasses.replace(scenario, **scenario.later)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"This is no scenario: {error}.", remedy) from None
        if unknown := [kind for kind in scenario.faults if kind not in FAULTS]:
            raise UserError(f"There is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}.", remedy)
        return scenario


def kind_of(fault: str) -> str:
    """`kind_of("lost_ack@rollout-0#2:1") == "lost_ack"`."""
    return fault.partition(":")[0].partition("@")[0]


class Dice:
    """Random streams by name, all from one seed: what one part of the world draws does not shift another's."""

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._streams: dict[str, random.Random] = {}

    def __call__(self, name: str) -> random.Random:
        """The stream of this name."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = random.Random(f"{self._seed}/{name}")
        return stream

    def of(self, part: str) -> Dice:
        """Streams of a part of the world's own."""
        return Dice(f"{self._seed}/{part}")


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = Dice(seed)
    recipe, speed, faults = dice("scenario/recipe"), dice("scenario/speed"), dice("scenario/faults")
    weights, episodes = dice("scenario/weights"), dice("scenario/episodes")
    group_size = recipe.choice((1, 2, 2, 3, 4))
    scenario = Scenario(
        seed=seed,
        steps=recipe.randint(3, 8),
        more_steps=recipe.choice((0, 0, 0, 1, 2)),
        max_staleness=recipe.choice((0, 0, 1, 1, 2, 3, 4, 8)),
        batch_groups=recipe.randint(1, 4),
        group_size=group_size,
        on_stale=recipe.choice(get_args(OnStale)),
        filter="none" if group_size == 1 else recipe.choice(get_args(Filter)),
        pace=recipe.random() < 0.6,
        partial_every=recipe.choice((0, 1, 2, 4, 8)),
        slots=recipe.choice((1, 2, 4, 8)),
        on_update=recipe.choice(get_args(OnUpdate)),
        max_new_tokens=recipe.choice((4, 12, 24, 40)),
        mean_tokens=recipe.choice((2, 4, 8)),
        checkpoint_every=recipe.randint(1, 4),
        keep_checkpoints=recipe.randint(1, 3),
        keep_versions=recipe.randint(1, 4),
        full_every=weights.choice((1, 2, 3, 5)),
        overlap=weights.random() < 0.7,
        workers=recipe.choice((1, 1, 2, 2, 3, 4)),
        rewarders=recipe.choice((1, 1, 2)),
        controllers=recipe.choice((1, 2, 2)),
        trainers=recipe.choice((1, 1, 2)),
        shared=recipe.random() < 0.5,
        equal_share=recipe.choice((0.0, 0.0, 0.3, 0.6)),
        token_s=speed.choice((0.02, 0.1, 0.3)),
        reward_s=speed.choice((0.05, 0.3, 1.0)),
        train_s=speed.choice((0.1, 0.5, 2.0)),
        swap_s=speed.choice((0.02, 0.2, 1.0)),
        network_s=speed.choice((0.0005, 0.003, 0.02)),
        disk_s=speed.choice((0.001, 0.01, 0.1)),
        ack_wait_s=speed.choice((1.0, 3.0, 6.0)),
        dedupe_window_s=speed.choice((0.5, 3.0, 120.0)),
        deadline_s=speed.choice((3.0, 120.0)),
        restart_s=speed.choice((0.1, 0.5, 2.0)),
        quiet_s=speed.choice((10.0, 20.0, 40.0)),
        later=_draw_later(dice("scenario/later")),
        faults=_draw_faults(faults),
    )
    corner = dice("scenario/corner")
    if corner.random() < CORNERS:
        return corner.choice((_unlike_answers, _rivals))(scenario)
    return _of_episodes(scenario, episodes) if episodes.random() < EPISODES else scenario


CORNERS: Final = 0.35  # share of the seeds that are led to where chance alone seldom gets
EPISODES: Final = 0.3  # share of the others whose samples are made by episodes


def _of_episodes(scenario: Scenario, dice: random.Random) -> Scenario:
    """Answers are short and few, as an episode has several; in some seeds turns have two, and episodes run again."""
    twice = {"duplicate": 0.5, "kill": 0.6, "stale_read": 0.1}
    if again := dice.random() < 0.3:
        scenario = dataclasses.replace(
            scenario,
            max_staleness=2 + scenario.seed % 3,
            pace=False,
            workers=3,
            slots=8,
            token_s=0.3,
            train_s=0.1,
            swap_s=0.02,
            dedupe_window_s=0.5,
            ack_wait_s=1.0,
            restart_s=0.1,
        )
    return dataclasses.replace(
        scenario,
        steps=min(scenario.steps, 5),
        batch_groups=min(scenario.batch_groups, 2),
        group_size=min(scenario.group_size, 3),
        episodes=dice.choice((1, 2, 2, 3)),
        at_once=dice.choice((2, 8, 64)),
        replayable=dice.random() < 0.8,
        per_turn=dice.random() < 0.2,
        max_turns=dice.choice((2, 3, 16, 16)),
        max_tokens=dice.choice((None, None, 24, 48)),
        max_new_tokens=min(scenario.max_new_tokens, 12),
        mean_tokens=min(scenario.mean_tokens, 4),
        token_s=scenario.token_s if again else min(scenario.token_s, 0.1),
        faults=scenario.faults | twice if again else scenario.faults,
    )


def _unlike_answers(scenario: Scenario) -> Scenario:
    """Some answers of a group are trained while others are too old, and the controller dies when it has decided so."""
    return dataclasses.replace(
        scenario,
        steps=8,
        max_staleness=1 + scenario.seed % 2,
        batch_groups=1,
        group_size=4,
        on_stale="mask",
        filter="none",
        pace=False,
        on_update="keep",
        mean_tokens=2,
        max_new_tokens=40,
        workers=4,
        slots=8,
        token_s=0.3,
        reward_s=0.05,
        train_s=0.02,
        swap_s=0.02,
        disk_s=0.001,
        network_s=0.0005,
        faults=scenario.faults | {"die_at_batch": 0.4},
    )


def _rivals(scenario: Scenario) -> Scenario:
    """One of two controllers sleeps over the loss of its lease, in the midst of a decision, and wakes up."""
    return dataclasses.replace(
        scenario,
        steps=8,
        max_staleness=2 + scenario.seed % 3,
        pace=False,
        controllers=2,
        train_s=0.1,
        faults=scenario.faults | {"stop_at_write": 0.3},
    )


def _draw_later(dice: random.Random) -> dict[str, Any]:
    """What a recipe may change between two starts of a run, as `ops.launch.FIXED` says."""
    choices = (
        ("max_staleness", (0, 1, 4)),
        ("on_stale", get_args(OnStale)),
        ("partial_every", (0, 3)),
        ("checkpoint_every", (1, 3)),
        ("pace", (False, True)),
    )
    return {field: dice.choice(values) for field, values in choices if dice.random() < 0.3}


_CRASHES: Final = (0.0005, 0.0015, 0.005, 0.015)  # at every call; more, and nothing ever begins
_RATES: Final[dict[str, tuple[float, ...]]] = {
    "crash_before": _CRASHES,
    "crash_after": _CRASHES,
    "crash_at_disk": (0.01, 0.03, 0.1),
    "reward_fails": (0.03, 0.3, 0.95),
    "episode_fails": (0.03, 0.3, 0.95),
    "stop_at_write": (0.01, 0.03, 0.1),
    "die_at_batch": (0.1, 0.3),
}


def _draw_faults(dice: random.Random) -> dict[str, float]:
    share = dice.choice((0.0, 0.15, 0.3, 0.5))  # of the kinds that are in at all
    out = {}
    for kind in FAULTS:
        rate = dice.choice(_RATES.get(kind, (0.05, 0.2, 0.6) if kind in TIMED else (0.01, 0.03, 0.1, 0.3)))
        if dice.random() < share:
            out[kind] = rate
    return out
