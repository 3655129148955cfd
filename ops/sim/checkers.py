"""Holds a simulated run to the invariants, at each entry that the log stores and once more at the end.

It sees the whole world at once, which no actor can, and computes everything again: each token from the weights that its
tag names, each version from the batches before it. Of the production code it uses only the messages; at the end the
log must also pass `ops.invariants`, so that the audit is held to the same truth.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from actors.trainer.samples import TrainSample
from bus.memory import MemoryHub
from bus.port import Entry
from bus.table import (
    ANSWERS,
    BATCHES,
    CONTROL,
    DROPPED,
    PARTIALS,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    STEPS,
    TURNS,
    WEIGHTS,
)
from bus.weights.files import digest_of
from ops.findings import Rules
from ops.invariants import READ_ORDER, Auditor
from ops.sim.episode_checks import EpisodeChecker, Key
from ops.sim.fakes import (
    FIRST_STATE,
    Disk,
    asked_of,
    bytes_of,
    length_of,
    next_state,
    prompt_tokens_of,
    reward_of,
    token_of,
)
from ops.sim.scenario import Scenario, kind_of
from ops.sim.weights import whole_of
from ops.sim.world import PROCESS, RUN, Process, World
from schemas import (
    Answer,
    Batch,
    Control,
    Dropped,
    MalformedMessage,
    Partial,
    Prompt,
    Rollout,
    Scored,
    StepDone,
    WeightVersion,
)
from schemas.trajectory import model_segments, model_tokens

# Faults for which a worker may end before all its prefixes are stored.
HINDERING: Final = frozenset(
    {"slow_call", "lost_answer", "partition", "restart", "power", "stall", "stop_at_write", "full"}
)
# Faults that make a message come again: so often, and it is held to kill its workers.
DISTURBING: Final = frozenset(
    {"kill", "power", "term", "stall", "partition", "restart", "drain", "lost_ack", "duplicate", "lost_answer"}
    | {"slow_call", "crash_before", "crash_after", "crash_at_disk", "stop_at_write", "die_at_batch"}
)


class Checker:
    """Watches the log of a world; what it finds goes to `World.violate`, what it sees to `World.count`."""

    def __init__(self, world: World, disk: Disk) -> None:
        self.world = world
        self.disk = disk
        self.rules = world.scenario  # as of the last start, as all that the checks hold to
        self.allowed: dict[str, Rules] = {}  # by the nonce of each start
        self._ways: set[tuple[int, str]] = set()
        self.newest = -1
        self.digests: list[str] = []  # of the weights, by version
        self.state = FIRST_STATE  # that a learner must have after the steps so far
        self.prompts: dict[Key, Prompt] = {}
        self.group_ends: dict[int, int] = {}  # samples of a group that were dropped
        self.ended_groups = 0  # whose samples were all dropped
        self.rollouts: dict[int, Rollout] = {}  # by sequence
        self.verdicts: dict[Key, Scored] = {}
        self.batches: list[Batch] = []
        self.trained: dict[Key, int] = {}  # -> step
        self.dropped: dict[Key, str] = {}  # -> reason
        self._ended: set[Key] = set()  # of these, by a controller; of what a worker gave up, a batch is the last word
        self.partials: dict[str, list[Partial]] = {}  # all that were stored, in order, by sample or turn
        self._known: dict[tuple[str, str], int] = {}  # how many of them, as a process was first given it
        self._rolled: set[Key] = set()
        self.episodes = EpisodeChecker(world, self.prompts, self.dropped, self._true_tokens)
        self.steps = 0
        self.garbage = 0  # entries that are no message
        self.ended = False
        self.progress_s = 0.0  # when the newest version was published, or the end announced
        self.final_states: set[str] = set()  # when the end was announced
        self._on: dict[str, Callable[[Entry, Any], None]] = {
            PROMPTS.name: self._prompt,
            TURNS.name: self.episodes.turn,
            ANSWERS.name: self._answer,
            PARTIALS.name: self._partial,
            ROLLOUTS.name: self._rollout,
            SCORED.name: self._scored,
            BATCHES.name: self._batch,
            DROPPED.name: self._drop,
            WEIGHTS.name: self._weights,
            STEPS.name: self._step,
            CONTROL.name: self._control,
        }

    def started(self, recipe: Scenario) -> None:
        """The run is started, or resumed, with this recipe."""
        self.rules = recipe
        self._ways.add((recipe.max_staleness, recipe.on_stale))
        rules = Rules(self.world.loop.time(), recipe.max_staleness, recipe.batch_groups, recipe.steps)
        self.allowed[f"start-{len(self.allowed) + 1}"] = rules

    @property
    def _steady(self) -> bool:
        """Whether the same was always done about old tokens: a smaller η makes tokens too old that were not."""
        return len(self._ways) == 1

    def stored(self, entry: Entry) -> None:
        """An entry was stored."""
        check = self._on.get(entry.stream.name)
        if check is None:
            return
        try:
            message = entry.message()
        except MalformedMessage:
            self.garbage += 1
            return
        check(entry, message)

    def _hold(self, invariant: str, promise: bool, what: str) -> None:
        if not promise:
            self.world.violate(invariant, what)

    # ---- admission

    def _prompt(self, entry: Entry, prompt: Prompt) -> None:
        key = prompt.group_id, prompt.index
        self._hold("I3", key not in self.prompts, f"sample {prompt.sample_id} is admitted twice")
        first = prompt.group_id not in self.group_ends
        self.prompts[key] = prompt
        self._hold(
            "I1",
            prompt.min_version <= self.newest,
            f"{prompt.sample_id} asks for version {prompt.min_version}, the newest is {self.newest}",
        )
        if first:
            self.group_ends[prompt.group_id] = 0
            at_work = len(self.group_ends) - self.ended_groups
            eta = max(rules.max_staleness for rules in self.allowed.values())
            bound = (eta + self.newest + 1) * self.rules.batch_groups
            self._hold(
                "I6", at_work <= bound, f"group {prompt.group_id} makes {at_work} live or trained; the bound is {bound}"
            )

    # ---- tokens

    def _true_tokens(self, what: str, message: Rollout | Answer | Partial, asked: str, min_version: int) -> None:
        """I5: each token and logprob is what the version in its tag gives at its place."""
        place = 0
        tokens, logprobs = message.tokens.tolist(), message.logprobs.tolist()
        for version, count in message.segments:
            if not min_version <= version <= self.newest:
                self.world.violate("I5", f"{what} has tokens of {version}, not {min_version}..{self.newest}")
                return
            for at in range(place, place + count):
                if (tokens[at], logprobs[at]) != token_of(asked, at, self.digests[version]):
                    self.world.violate("I5", f"{what}: version {version} did not make token {at}")
                    return
            place += count

    def _partial(self, entry: Entry, partial: Partial) -> None:
        prompt, turn = self.prompts.get((partial.group_id, partial.index)), self.episodes.turns.get(partial.turn)
        if prompt is None or (partial.turn and turn is None):
            self.world.violate("I5", f"partial {partial.of} is of nothing that was asked for")
            return
        asked = asked_of(prompt.seed) if turn is None else asked_of(turn.seed, turn.prompt_tokens.tolist())
        self._true_tokens(f"partial {partial.of}", partial, asked, prompt.min_version)
        self.partials.setdefault(partial.of, []).append(partial)

    def given(self, process: Process, entry: Entry) -> None:
        """A process was given an entry of a queue."""
        if entry.stream in (PROMPTS, TURNS):
            self._known.setdefault((process.label, entry.id), len(self.partials.get(entry.id, ())))

    def acknowledged(self, entry: Entry) -> None:
        """An entry of a queue was acknowledged: what came of it must be stored by then."""
        if (key := entry.sample) is None:
            return
        match entry.stream.name:
            case PROMPTS.name:
                stored = key in self._rolled
            case TURNS.name:
                stored = entry.id in self.episodes.answers
            case _:
                stored = key in self.verdicts
        self._hold("I2", stored or key in self.dropped, f"{entry.stream.name} {entry.id} is acknowledged for nothing")

    def left(self, process: Process) -> None:
        """A process ended in order: what its engine had begun must be in the log."""
        if HINDERING.intersection(map(kind_of, self.world.struck)):
            return
        for name, tokens in process.handed_over:
            kept = {len(partial.tokens) for partial in self.partials.get(name, ())}
            self._hold("I5", tokens in kept, f"{process} has left and took {tokens} tokens of {name} with it")

    def _continued(self, name: str, made: Rollout | Answer) -> None:
        """Whoever is given a prompt or a turn goes on from its newest prefix, or from one that is stored later.

        An answer may end within the prefix, at a string that somebody looked for too late.
        """
        process = PROCESS.get()
        known = self._known.get((process.label, name)) if process is not None else None
        if not known or "stale_read" in map(kind_of, self.world.struck):
            return
        ends = len(made.tokens) if made.stopped else None
        begins = any(
            np.array_equal(made.tokens[: len(partial.tokens)], partial.tokens[:ends])
            for partial in self.partials[name][known - 1 :]
        )
        self._hold("I5", begins, f"{process} has finished {name} and not begun with its kept prefix")
        if made.resumed:
            self.world.count("a partial answer was continued by another worker")

    def _answer(self, entry: Entry, answer: Answer) -> None:
        self.episodes.answer(entry, answer)
        if not answer.error:
            self._continued(answer.turn, answer)

    def _rollout(self, entry: Entry, rollout: Rollout) -> None:
        key = rollout.group_id, rollout.index
        self.rollouts[entry.seq] = rollout
        self._rolled.add(key)
        if (prompt := self.prompts.get(key)) is None:
            self.world.violate("I5", f"rollout {rollout.sample_id} was never admitted")
            return
        same = rollout.prompt == prompt.prompt and rollout.task == prompt.task
        self._hold("log", same, f"rollout {rollout.sample_id} is of another prompt")
        if self.rules.episodes:
            self.episodes.rollout(rollout)
        else:
            self._whole(prompt, rollout)
        if len(rollout.segments) > 1:
            self.world.count("an answer of several versions")

    def _whole(self, prompt: Prompt, rollout: Rollout) -> None:
        """The one answer to a prompt."""
        name = rollout.sample_id
        self._true_tokens(f"rollout {name}", rollout, asked_of(prompt.seed), prompt.min_version)
        length = min(length_of(prompt.seed, self.rules.mean_tokens), self.rules.max_new_tokens)
        self._hold("I5", len(rollout.tokens) == length, f"{name} ends after {len(rollout.tokens)} tokens")
        same = tuple(rollout.prompt_tokens.tolist()) == prompt_tokens_of(prompt.prompt)
        self._hold("log", same, f"rollout {name} has the tokens of another prompt")
        self._continued(name, rollout)

    def _scored(self, entry: Entry, scored: Scored) -> None:
        key = scored.group_id, scored.index
        rollout = self.rollouts.get(scored.rollout_seq)
        if rollout is None or (rollout.group_id, rollout.index) != key:
            self.world.violate("log", f"the verdict on {scored.sample_id} names rollouts {scored.rollout_seq}")
            return
        self._hold(
            "log", scored.segments == rollout.segments, f"the verdict on {scored.sample_id} tells other segments"
        )
        if scored.verdict == "scored":
            own = rollout.reward
            want = reward_of(rollout.task, rollout.tokens.tolist()) if own is None else own
            self._hold("log", scored.reward == want, f"{scored.sample_id} is worth {want}, not {scored.reward}")
        if key in self.verdicts:
            self.world.count("a second verdict on a sample")
        self.verdicts.setdefault(key, scored)

    # ---- ends

    def _batch(self, entry: Entry, batch: Batch) -> None:
        step, rules = len(self.batches), self.rules
        self._hold("I3", batch.step == step, f"batch {batch.step} stands where batch {step} must")
        self._hold("I3", entry.seq == step + 1, f"batch {step} stands at {entry.seq}")
        told = batch.max_staleness == rules.max_staleness
        self._hold("I1", told, f"batch {step} allows η = {batch.max_staleness}, not {rules.max_staleness}")
        groups = set(batch.group_ids.tolist())
        self._hold("log", len(groups) == rules.batch_groups, f"batch {step} has {len(groups)} groups")
        ended_here = {tuple(map(int, name.split("-"))) for name, *_ in batch.dropped}
        for key, seq, reward in zip(
            self._keys(batch), batch.rollout_seqs.tolist(), batch.rewards.tolist(), strict=True
        ):
            name = f"{key[0]}-{key[1]}"
            self._hold("I3", key not in self.trained, f"step {step} trains {name} again")
            self._hold("I3", key not in self._ended and key not in ended_here, f"step {step} trains {name}: dropped")
            self.trained[key] = step
            rollout, verdict = self.rollouts.get(seq), self.verdicts.get(key)
            if rollout is None or verdict is None or (rollout.group_id, rollout.index) != key:
                self.world.violate("log", f"step {step} trains {name} from rollouts {seq}, which is not it")
                continue
            self._hold(
                "log", reward == verdict.reward, f"step {step} trains {name} with {reward}, not {verdict.reward}"
            )
            self._ages(step, name, rollout)
        for group in sorted(groups):
            size = rules.group_size
            open_ = [
                i for i in range(size) if not {(group, i)} & (self.trained.keys() | self.dropped.keys() | ended_here)
            ]
            self._hold("I2", not open_, f"step {step} forgets samples {open_} of group {group}")
        self.batches.append(batch)

    def _ages(self, step: int, name: str, rollout: Rollout) -> None:
        eta = self.rules.max_staleness
        for version, count in model_segments(rollout.segments, rollout.observations):
            age = step - version
            self._hold("I1", age >= 0, f"step {step} trains {count} tokens of {name} of the later version {version}")
            if age > eta:
                self.world.count("tokens were masked for their age")
                masks = self.rules.on_stale == "mask" and (eta > 0 or not self._steady)
                masks |= self.rules.on_stale == "wait" and not self._steady
                self._hold("I1", masks, f"step {step} has tokens of {name} that are {age} versions old")
            elif age == eta:
                self.world.count("a token as old as the bound allows")

    def _drop(self, entry: Entry, dropped: Dropped) -> None:
        key = dropped.group_id, dropped.index
        name = dropped.sample_id
        self.episodes.drop(dropped)
        chosen = bool(dropped.worker) or dropped.reason != "filtered"
        self._hold("I2", chosen, f"{name} is dropped by a filter that the recipe does not have")
        self._hold("I2", dropped.group_id in self.group_ends, f"{name} is dropped and was never admitted")
        if dropped.worker and key in self.trained:
            self.world.count("a worker gave up a sample that was trained")
            return
        self._hold("I3", key not in self.trained, f"{name} is dropped ({dropped.reason}) and trained")
        if not dropped.worker:
            self._ended.add(key)
        if key in self.dropped:
            self.world.count("a second drop of a sample")
            return
        self.world.count(f"dropped: {dropped.reason}")
        late = dropped.reason == "stale" and self.rules.on_stale == "wait" and self._steady
        self._hold("I1", not late, f"{name} is dropped for its age, though the batches wait for it")
        if dropped.reason == "dead_letter":
            disturbed = DISTURBING.intersection(map(kind_of, self.world.struck))
            self._hold("I2", bool(disturbed), f"{name} is given up without need: {dropped.detail}")
        self.dropped[key] = dropped.reason
        if dropped.group_id in self.group_ends:
            self.group_ends[dropped.group_id] += 1
            self.ended_groups += self.group_ends[dropped.group_id] == self.rules.group_size

    # ---- training

    def _weights(self, entry: Entry, event: WeightVersion) -> None:
        version = self.newest + 1
        self._hold("I4", event.version == version, f"version {event.version} is published after {self.newest}")
        self._hold("I4", entry.seq == event.version + 1, f"version {event.version} stands at {entry.seq}")
        self._hold("I4", event.path in self.disk.weights, f"version {event.version} is announced before its bytes")
        contents = self.disk.weights.get(event.path, "")
        base, whole = whole_of(contents)
        for digest, text in ((event.digest, contents), (event.result_digest, whole)):
            same = digest_of(text.encode()) == digest
            self._hold("I4", same, f"version {event.version} has other bytes than announced")
        if event.kind == "delta":
            stands = 0 <= event.base < len(self.digests) and self.digests[event.base] == base
            self._hold("I4", stands, f"version {event.version} is a delta of something else than version {event.base}")
        if version > 0:
            if len(self.batches) < version:
                self.world.violate("I7", f"version {version} is published before batch {version - 1} is formed")
                return
            self.state = next_state(self.state, version - 1, self._samples(self.batches[version - 1]))
        self._hold("I7", whole == bytes_of(version, self.state), f"version {version} is not what the log gives")
        self.newest = event.version
        self.progress_s = self.world.loop.time()
        self.digests.append(event.result_digest)

    def _samples(self, batch: Batch) -> list[TrainSample]:
        """What the step of a batch must be given."""
        samples = []
        for key, seq, reward in zip(
            self._keys(batch), batch.rollout_seqs.tolist(), batch.rewards.tolist(), strict=True
        ):
            rollout = self.rollouts[seq]
            versions = list(itertools.chain.from_iterable([version] * count for version, count in rollout.segments))
            made = model_tokens(rollout.observations, len(versions)).tolist()
            fresh = [
                mine and batch.step - version <= batch.max_staleness
                for mine, version in zip(made, versions, strict=True)
            ]
            samples.append(
                TrainSample(
                    f"{key[0]}-{key[1]:06d}",
                    key[0],
                    rollout.prompt_tokens,
                    rollout.tokens,
                    rollout.logprobs,
                    np.array(fresh, np.bool_),
                    reward,
                    sequences=rollout.sequences if len(rollout.sequences) else None,
                )
            )
        return samples

    def _step(self, entry: Entry, done: StepDone) -> None:
        self._hold("I3", done.step == self.steps == entry.seq - 1, f"step {done.step} stands at {entry.seq}")
        self._hold("I4", self.newest >= done.version == done.step + 1, f"step {done.step} made {done.version}")
        ages: Counter[int] = Counter()
        for sample in self._samples(self.batches[done.step]):
            rollout = self.rollouts[self._seq_of(done.step, sample)]
            for version, count in model_segments(rollout.segments, rollout.observations):
                if done.step - version <= self.batches[done.step].max_staleness:
                    ages[done.step - version] += count
        told = {age: count for age, count in enumerate(done.staleness.tolist()) if count}
        self._hold("I1", told == dict(ages), f"step {done.step} tells ages {told}, they are {dict(ages)}")
        self.steps += 1

    def _seq_of(self, step: int, sample: TrainSample) -> int:
        group, index = map(int, sample.sample_id.split("-"))
        batch = self.batches[step]
        at = self._keys(batch).index((group, index))
        return int(batch.rollout_seqs[at])

    def _control(self, entry: Entry, control: Control) -> None:
        if control.action == "stop":
            self._hold("I8", self.newest >= self.rules.steps, f"the end is announced at version {self.newest}")
            self.ended = True
            self.progress_s = self.world.loop.time()
            self.final_states.add(self.state)

    @staticmethod
    def _keys(batch: Batch) -> list[Key]:
        return list(zip(batch.group_ids.tolist(), batch.indices.tolist(), strict=True))

    # ---- the end

    def finish(self, hub: MemoryHub) -> None:
        """The run is over and all processes have ended."""
        steps = self.rules.steps
        self._hold("I8", self.ended, "all processes ended, the run did not")
        self._hold("I4", self.newest == steps, f"the run ended at version {self.newest} of {steps}")
        self._hold("I3", len(self.batches) == steps, f"the run ended with {len(self.batches)} batches of {steps}")
        self._hold("I3", self.steps == steps, f"the run ended with {self.steps} steps done of {steps}")
        for key in self.prompts:
            self._hold("I2", key in self.trained or key in self.dropped, f"{key[0]}-{key[1]} has no end")
        self.episodes.finish(self.trained)
        good = self.state in self.disk.exported and self.final_states.issuperset(self.disk.exported)
        self._hold("I7", good, f"the exported model is not that of the last step: {self.disk.exported}")
        self._audit(hub)

    def _audit(self, hub: MemoryHub) -> None:
        def digest(event: WeightVersion) -> str | None:
            contents = self.disk.weights.get(event.path)
            return None if contents is None else digest_of(contents.encode())

        auditor = Auditor(lambda control, time_s: self.allowed[control.nonce], digest)
        for stream in READ_ORDER:
            for entry in hub.runs[RUN].logs[stream.name].entries.values():
                auditor.feed(entry)
        report = auditor.report()
        self._hold("audit", report.ended, "the audit holds that the run has not ended")
        malformed = report.totals.get("malformed entries", 0)
        self._hold("audit", malformed <= self.garbage, f"the audit met {malformed} malformed entries")
        for check in report.checks:
            for example in check.examples[:1]:
                self.world.violate("audit", f"{check.name}: {example}")
