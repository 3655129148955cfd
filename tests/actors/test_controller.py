"""The gate and the batcher decide what is generated and trained; held here to a twin that recounts everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.controller.batcher import select
from actors.controller.config import ControllerConfig
from actors.controller.core import ControllerCore
from actors.controller.groups import Answer, Group
from schemas import Batch, Dropped, Scored, decode, encode

STEPS = 4


def config(**changes: Any) -> ControllerConfig:
    return ControllerConfig(**{"max_staleness": 1, "batch_groups": 2, "group_size": 2, "pace": False} | changes)


def scored(group_id: int, index: int, reward: float | None, segments: list[tuple[int, int]], **changes: Any) -> Scored:
    fields: dict[str, Any] = {
        "group_id": group_id,
        "index": index,
        "group_size": 2,
        "rollout_seq": 1 + group_id * 100 + index,
        "prompt_length": 3,
        "segments": segments,
        "finish": "stop",
        "verdict": "scored" if reward is not None else "timeout",
        "reward": reward,
    }
    return Scored(**fields | changes)


class World:
    """A log in memory around a core, and the twin: it keeps every fact for ever and recounts from them."""

    def __init__(self, cfg: ControllerConfig, steps: int = STEPS) -> None:
        self.config = cfg
        self.steps = steps
        self.core = ControllerCore(cfg, steps)
        self.prompts: list[tuple[int, int, int]] = []  # (group, index, min version), sequence = position + 1
        self.scores: list[Scored] = []
        self.drops: list[Dropped] = []
        self.batches: list[Batch] = []
        self.version = -1

    def settle(self, crash_after: int | None = None) -> None:
        """Publish decisions until there are none, checking each against the twin; or only so many messages, and die."""
        left = 1_000_000 if crash_after is None else crash_after
        while decision := self.core.decide():
            if left == 0:
                return
            if decision.batch is not None:
                left -= 1
                self.check_batch(decision.batch)
                message = decode(encode(decision.batch))
                assert isinstance(message, Batch)
                self.batches.append(message)
            for dropped in decision.drops[:left]:
                if dropped.id not in {known.id for known in self.drops}:  # the broker's part
                    self.drops.append(dropped)
            left -= len(decision.drops[:left])
            for admission in decision.admissions:
                indices = admission.indices[:left]
                self.prompts.extend((admission.group_id, index, admission.min_version) for index in indices)
                left -= len(indices)
                assert admission.min_version <= self.version
            if left == 0:
                return
            self.core.saw_own_prompts(len(self.prompts))
        self.check_gate()

    def ended(self) -> set[tuple[int, int]]:
        trained = {pair for batch in self.batches for pair in zip(batch.group_ids, batch.indices, strict=True)}
        return {(int(g), int(i)) for g, i in trained} | {(d.group_id, d.index) for d in self.drops}

    def live(self) -> set[int]:
        ended = self.ended()
        return {group for group, index, _ in self.prompts if (group, index) not in ended}

    def check_gate(self) -> None:
        """Paper eq. 3, recounted: never over the bound, and never under it without a reason."""
        bound = min(self.config.max_staleness + self.version + 1, self.steps) * self.config.batch_groups
        if self.version < 0:
            bound = 0
        held = len(self.live()) + len(self.batches) * self.config.batch_groups
        assert held <= bound
        if len(self.batches) < self.steps:
            assert held == bound

    def check_batch(self, batch: Batch) -> None:
        step = batch.step
        assert step == len(self.batches)
        assert self.version >= step - 1
        assert len(set(batch.group_ids.tolist())) == self.config.batch_groups
        by_sample = {(s.group_id, s.index): s for s in self.scores}
        before = self.ended()
        for pair in zip(batch.group_ids.tolist(), batch.indices.tolist(), strict=True):
            assert pair not in before, "a sample was listed twice, or after it was dropped"
            verdict = by_sample[pair]
            ages = [step - version for version, _ in verdict.segments]
            assert min(ages) <= self.config.max_staleness, "no token of the sample can be trained"
            if self.config.on_stale != "mask":
                assert max(ages) <= self.config.max_staleness
        if self.config.on_stale == "wait":
            assert not batch.dropped

    def rewards_due(self) -> list[tuple[int, int, int]]:
        known = {(s.group_id, s.index) for s in self.scores} | self.ended()
        return [prompt for prompt in self.prompts if prompt[:2] not in known]

    def crash(self, after: int) -> None:
        """Die in the midst of publishing; the successor completes what was begun."""
        self.settle(crash_after=after)
        self.core = self.folded()

    def restart(self) -> None:
        """What a successor folds from the log must decide the same."""
        core = self.folded()
        assert {g: (v.answers, v.lost) for g, v in core.live.items()} == {
            g: (v.answers, v.lost) for g, v in self.core.live.items()
        }
        assert (core.next_step, core.next_group) == (self.core.next_step, self.core.next_group)
        assert set(core.live) == self.live()
        known = {dropped.id for dropped in self.drops}
        self.core = core
        decision = core.decide()
        assert {dropped.id for dropped in decision.drops} <= known, "it repeats drops, and invents none"
        assert not decision.admissions
        assert decision.batch is None

    def folded(self) -> ControllerCore:
        """The core that the log tells."""
        last = self.batches[-1] if self.batches else None
        core = ControllerCore(self.config, self.steps, last)
        marks = last.marks if last else {}
        for seq, prompt in enumerate(self.prompts, start=1):
            if seq >= marks.get("prompts", 1):
                core.saw_prompt(seq, *prompt)
        if self.version >= 0:
            core.saw_weights(self.version)
        for seq, dropped in enumerate(self.drops, start=1):
            if seq >= marks.get("dropped", 1):
                core.saw_dropped(seq, dropped)
        for seq, score in enumerate(self.scores, start=1):
            if seq >= marks.get("scored", 1):
                core.saw_scored(seq, score)
        return core


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_gate_and_batcher_agree_with_a_twin_that_recounts_everything(data: st.DataObject) -> None:
    """Any order of answers, failures, versions and restarts: the bound holds, nothing is lost, nothing twice."""
    cfg = config(
        max_staleness=data.draw(st.integers(0, 3)),
        batch_groups=data.draw(st.integers(1, 3)),
        on_stale=data.draw(st.sampled_from(["mask", "drop", "wait"])),
        filter=data.draw(st.sampled_from(["none", "zero_variance"])),
    )
    world = World(cfg)
    world.core.saw_weights(0)
    world.version = 0
    world.settle()
    failures = data.draw(st.sampled_from([0.0, 0.2]))
    for _ in range(120):
        due = world.rewards_due()
        if len(world.batches) == world.steps and not due:
            break
        may_train = world.version < len(world.batches)
        kinds = (["score"] * 3 if due else []) + (["train"] if may_train else []) + ["restart"]
        match data.draw(st.sampled_from([*kinds, "crash"])):
            case "crash":
                if due:
                    score = scored(*due[0][:2], 1.0, [(due[0][2], 1)])
                    world.scores.append(score)
                    world.core.saw_scored(len(world.scores), score)
                world.crash(data.draw(st.integers(0, 8)))
            case "score":
                group, index, promised = data.draw(st.sampled_from(due))
                first = data.draw(st.integers(promised, world.version))
                last = data.draw(st.integers(first, world.version))
                segments = [(first, 2)] if first == last else [(first, 2), (last, 1)]
                failed = data.draw(st.floats(0, 1)) < failures
                reward = None if failed else float(data.draw(st.integers(0, 1)))
                score = scored(group, index, reward, segments)
                world.scores.append(score)
                world.core.saw_scored(len(world.scores), score)
            case "train":
                world.version += 1
                world.core.saw_weights(world.version)
            case "restart":
                world.restart()
        world.settle()
    finish(world)
    trained = [p for b in world.batches for p in zip(b.group_ids.tolist(), b.indices.tolist(), strict=True)]
    dropped = [(d.group_id, d.index) for d in world.drops]
    assert len(world.batches) == world.steps, "it came to a halt (I8)"
    assert sorted(trained + dropped) == sorted({prompt[:2] for prompt in world.prompts}), "each ends exactly once"


def finish(world: World) -> None:
    """No more faults: all answers come, the trainer trains. Then the run must end (I8)."""
    for turn in range(10_000):
        for group, index, promised in world.rewards_due():
            score = scored(group, index, float(turn + index), [(max(promised, world.version), 1)])
            world.scores.append(score)
            world.core.saw_scored(len(world.scores), score)
        world.settle()
        if world.version < len(world.batches):
            world.version += 1
            world.core.saw_weights(world.version)
        elif len(world.batches) == world.steps:
            break
    world.settle()


def _can_schedule(deadlines: list[int], step: int, batch_groups: int) -> bool:
    """The twin of the waiting rule: really put the groups into the coming batches, earliest deadline first."""
    at, room = step + 1, batch_groups
    for deadline in sorted(deadlines):
        if room == 0:
            at, room = at + 1, batch_groups
        if deadline < at:
            return False
        room -= 1
    return True


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_waiting_forms_a_batch_exactly_if_the_rest_can_still_be_trained_in_time(
    groups: list[tuple[int, bool]], step: int, batch_groups: int, max_staleness: int
) -> None:
    """`wait` must neither let a token grow too old nor wait longer than needed."""
    live = []
    for group_id, (age, complete) in enumerate(groups):
        version = max(0, step - age)
        if step - version > max_staleness:
            continue  # admission and the rule itself exclude it
        group = Group(group_id, 2, version, first_prompt_seq=1)
        if complete:
            group.answers = {i: Answer(1, float(i), ((version, 1),)) for i in range(2)}
        live.append(group)
    chosen = select(live, step, batch_groups, max_staleness, "wait").groups
    if not _can_schedule([g.deadline(max_staleness) for g in live], step - 1, batch_groups):
        # Never so by the gate, but by a resume with a smaller η. Then it may not wait for what cannot be.
        assert chosen or len(live) < batch_groups or not all(g.complete for g in live)
        return
    ready = sorted((g for g in live if g.complete), key=lambda g: (g.deadline(max_staleness), g.group_id))
    picked = ready[:batch_groups]
    rest = [g.deadline(max_staleness) for g in live if g not in picked]
    possible = len(picked) == batch_groups and _can_schedule(rest, step, batch_groups)
    assert bool(chosen) == possible
    if chosen:
        assert {g.group_id for g in chosen} == {g.group_id for g in picked}


def test_a_group_on_its_way_is_due_by_what_was_promised_and_not_by_what_came_first() -> None:
    """Its next answer may still hold tokens of the promised version, however new the first one is."""
    group = Group(0, 2, min_version=1, first_prompt_seq=1)
    group.answers[0] = Answer(1, 1.0, ((5, 3),))
    assert group.deadline(2) == 3
    group.answers[1] = Answer(2, 0.0, ((4, 3),))
    assert group.deadline(2) == 6


def test_a_batch_takes_the_earliest_deadline_and_never_the_first_to_finish() -> None:
    """Taking what is finished first would favour short answers."""
    old, new = Group(7, 2, 0, 1), Group(3, 2, 2, 1)
    for group, version in ((old, 0), (new, 2)):
        group.answers = {i: Answer(1, float(i), ((version, 4),)) for i in range(2)}
    assert [g.group_id for g in select([new, old], 2, 1, 4, "mask").groups] == [7]


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_a_token_that_is_too_old_is_masked_or_its_sample_dropped(on_stale: Any) -> None:
    """I1 is hard, per token, whatever was promised when the group was admitted."""
    group = Group(0, 3, 0, 1)
    group.answers = {
        0: Answer(1, 0.0, ((0, 3), (3, 2))),  # begun long ago, finished lately
        1: Answer(2, 1.0, ((3, 2),)),
        2: Answer(3, 1.0, ((3, 2),)),
    }
    selection = select([group], 3, 1, 1, on_stale)
    assert [g.group_id for g in selection.groups] == [0]
    assert selection.stale == ({} if on_stale == "mask" else {0: [0]})
    wholly_old = Group(1, 2, 0, 1)
    wholly_old.answers = {i: Answer(1, float(i), ((0, 3),)) for i in range(2)}
    assert select([wholly_old], 3, 1, 1, on_stale).dead == (wholly_old,)


def test_at_eta_zero_only_one_batch_is_ever_on_its_way() -> None:
    """η = 0 is synchronous, on-policy training."""
    world = World(config(max_staleness=0))
    world.core.saw_weights(0)
    world.version = 0
    world.settle()
    assert {group for group, _, _ in world.prompts} == {0, 1}
    for group, index, _ in list(world.prompts):
        world.scores.append(scored(group, index, float(index), [(0, 1)]))
        world.core.saw_scored(len(world.scores), world.scores[-1])
    world.settle()
    assert len(world.batches) == 1
    assert {group for group, _, _ in world.prompts} == {0, 1}, "nothing new before version 1"
    world.version = 1
    world.core.saw_weights(1)
    world.settle()
    assert {group for group, _, _ in world.prompts} == {0, 1, 2, 3}


def test_a_failed_verdict_costs_its_sample_and_a_lonely_rest_costs_the_group() -> None:
    """A timeout is never a 0: the sample is dropped with its reason, and one answer alone compares with nothing."""
    world = World(config(max_staleness=0))
    world.core.saw_weights(0)
    world.version = 0
    world.settle()
    for index, reward in ((0, None), (1, 1.0)):
        world.scores.append(scored(0, index, reward, [(0, 1)]))
        world.core.saw_scored(len(world.scores), world.scores[-1])
    world.settle()
    assert [(d.index, d.reason) for d in world.drops] == [(0, "timeout"), (1, "group_too_small")]
    assert {group for group, _, _ in world.prompts} == {0, 1, 2}, "it was refilled at once"


def test_equal_rewards_that_are_no_binary_fractions_have_no_variance() -> None:
    """0.1 + 0.2 and 0.3 differ by rounding; training on such a difference would be training on noise."""
    group = Group(0, 2, 0, 1)
    group.answers = {0: Answer(1, 0.1 + 0.2, ((0, 1),)), 1: Answer(2, 0.3, ((0, 1),))}
    assert group.zero_variance


def test_a_verdict_on_a_group_of_another_controller_says_that_this_one_was_overtaken() -> None:
    """Ignored, it would lie before the marks of the next batch, and nobody would ever count it."""
    core = ControllerCore(config(), STEPS)
    core.saw_weights(0)
    core.decide()
    core.saw_scored(1, scored(0, 0, 1.0, [(0, 1)]))
    assert not core.overtaken
    core.saw_scored(2, scored(core.next_group, 0, 1.0, [(0, 1)]))
    assert core.overtaken


def test_what_the_model_was_told_is_carried_along_and_not_counted_as_its_own() -> None:
    """Observations go through the trainer, so ranks share them out; they are nobody's wasted or generated tokens."""
    world = World(config(max_staleness=0, batch_groups=1))
    world.core.saw_weights(0)
    world.version = 0
    world.settle()
    for group, index, reward in ((0, 0, 0.0), (0, 1, None), (1, 0, 0.0), (1, 1, 1.0)):
        if group >= world.core.next_group:
            world.settle()
        world.scores.append(scored(group, index, reward, [(0, 4), (0, 6)], observations=[3, 2, 8, 1]))
        world.core.saw_scored(len(world.scores), world.scores[-1])
        world.settle()
    assert [(d.sample_id, d.reason, d.tokens) for d in world.drops] == [
        ("0-1", "timeout", 7),
        ("0-0", "group_too_small", 7),
    ]
    (batch,) = world.batches
    assert batch.lengths.tolist() == [13, 13]  # 3 of the prompt
    assert batch.seen["response_length"] == 7


@pytest.mark.parametrize(
    ("digests", "told"),
    [
        ("aa aa aa", [None, None, None]),
        ("ab bb bb", [2, None, None]),  # in the midst of a batch
        ("aa bb bb", [None, 2, None]),  # exactly between two
        ("aa ab aa", [None, 2, 2]),
        ("aa bc cc", [None, 3, None]),
    ],
)
def test_a_change_of_the_reward_function_is_told_once_wherever_it_falls(digests: str, told: list[float | None]) -> None:
    world = World(config(max_staleness=3, batch_groups=1))
    world.core.saw_weights(0)
    world.version = 0
    world.settle()
    for group, of_group in enumerate(digests.split()):
        for index, digest in enumerate(of_group):
            world.scores.append(scored(group, index, float(index), [(0, 4)], reward_digest=digest))
            world.core.saw_scored(len(world.scores), world.scores[-1])
        world.settle()
        world.version += 1
        world.core.saw_weights(world.version)
        world.settle()
    assert [batch.seen.get("reward_digests") for batch in world.batches] == told
