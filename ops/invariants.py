"""Pure checkers of the invariants I1-I6 over a run's log, one pass per stream.

Feed an `Auditor` the entries of the streams one after another in `READ_ORDER`, then ask for its `report`. The order is
chosen so that what refers is read before what is referred to: then the bulk, prompts and rollouts, streams past once
and only ids stay in memory. Where headers tell enough, nothing is decoded; where not, only the envelope is.

Across streams only the broker's clock orders events. A checker alarms only if the order is certain, that is beyond
`CLOCK_SLACK_S`: it may miss what happened within that span, and never accuses a sound log.
"""

from __future__ import annotations

import bisect
import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final

from bus.port import FROM_HEADER, REASON_HEADER, SEQ_HEADER, WAS_HEADER, Entry
from bus.table import (
    ANSWERS,
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    EVALUATIONS,
    NOTES,
    PARTIALS,
    PROMPTS,
    PUBLISH_DEADLINE_S,
    ROLLOUTS,
    SCORED,
    STEPS,
    TURNS,
    WEIGHTS,
)
from ops.audit_memory import Group, GroupDrops, Prefix, Trained
from ops.findings import DEAD_LETTERS_MAX, PROMISES, REPLAYED, Check, Report, Rules
from ops.raw_entries import fields_of, group_of, named, prefix_digest, sample_key, segments_in
from ops.turn_checks import TurnChecks
from schemas import Batch, Control, Evaluation, MalformedMessage, Segments, StepDone, WeightVersion
from schemas.trajectory import model_segments
from schemas.upcast import NewerMessage

READ_ORDER: Final = (
    CONTROL, WEIGHTS, EVALUATIONS, BATCHES, DROPPED, PROMPTS, PARTIALS, TURNS, ANSWERS, NOTES, ROLLOUTS, SCORED, STEPS,
    DEAD,
)  # fmt: skip
FLOAT_BYTES: Final = 4
CLOCK_SLACK_S: Final = 0.25  # clocks of the servers of a cluster differ, and one server's clock can be set


class Auditor:
    """Checks a log as it is fed.

    `rules_of(control, time_s)` reads the rules out of a start record. `digest_of(version)` is the digest of a version's
    bytes, None if they are no longer kept. Prompts up to `gated_seq` are held to I6: in a log that is still being
    written, the drops that made room for later ones may not have been read.
    """

    def __init__(
        self,
        rules_of: Callable[[Control, float], Rules | None] = lambda control, time_s: None,
        digest_of: Callable[[WeightVersion], str | None] = lambda version: None,
        gated_seq: int = 1 << 62,
    ) -> None:
        self.checks = {name: Check(name) for name in PROMISES if name != REPLAYED}
        self._rules_of = rules_of
        self._digest_of = digest_of
        self._gated_seq = gated_seq
        self._rules: list[Rules] = []
        self._ends: set[str] = set()
        self._resumed = False  # since the last end that was announced, maybe for more steps
        self._published_s: dict[int, float] = {}  # by version
        self._eta: dict[int, int] = {}  # the bound of each batch, by step
        self._newest: Batch | None = None
        self._newest_ended: set[str] = set()  # what its decision dropped, and what it left alive, below
        self._newest_live: set[int] = set()
        self._trained: dict[int, Trained] = {}  # by sample key, as most of what follows
        self._trained_groups: set[int] = set()
        self._key_at: dict[int, int] = {}  # rollout sequence -> sample, of trained ones not yet seen in the rollouts
        self._dropped_why: dict[int, str] = {}
        self._given_up: set[int] = set()  # of these, by a worker and not by the controller
        self._drops: dict[int, GroupDrops] = {}  # by group
        self._groups: dict[int, Group] = {}  # in order of admission
        self._gated: list[int] = []
        self._prompted: set[int] = set()
        self._prefixes: dict[str, Prefix] = {}  # by the id of the turn or sample that each is of
        self._rolled: set[int] = set()
        self._judged: set[int] = set()
        self._ages: dict[int, Counter[int]] = defaultdict(Counter)  # step -> age -> trained tokens
        self._evaluated: set[str] = set()  # ids
        self._steps = 0
        self._totals: Counter[str] = Counter()
        self._dead_letters: list[str] = []
        self._turns = TurnChecks(self.checks, self._totals, lambda sample: sample_key(sample) in self._prompted)
        self._take: dict[str, Callable[[Entry], None]] = {
            CONTROL.name: self._control,
            WEIGHTS.name: self._weights,
            EVALUATIONS.name: self._evaluation,
            BATCHES.name: self._batch,
            DROPPED.name: self._drop,
            PROMPTS.name: self._prompt,
            PARTIALS.name: self._partial,
            TURNS.name: self._turns.turn,
            ANSWERS.name: self._answer,
            NOTES.name: self._turns.note,
            ROLLOUTS.name: self._rollout,
            SCORED.name: self._score,
            STEPS.name: self._step,
            DEAD.name: self._dead,
        }

    def feed(self, entry: Entry) -> None:
        """Take the next entry. One that does not decode is counted; if that cost a sample, I2 will tell."""
        try:
            self._take[entry.stream.name](entry)
        except NewerMessage as error:
            self.checks["log"].fail(f"{entry.stream.name} {entry.seq} cannot be checked: {error}")
        except (MalformedMessage, KeyError, TypeError, ValueError, struct.error):
            self._totals["malformed entries"] += 1

    def report(self) -> Report:
        """The outcome, after everything was fed."""
        ended = bool(self._ends) and not self._resumed
        if self._rules:
            ended = f"end-{self._rules[-1].steps}" in self._ends
        self._settle_samples(ended)
        self._settle_gate()
        log = self.checks["log"]
        for seq, key in self._key_at.items():
            log.fail(f"step {self._trained[key].step} trains {named(key)} from rollouts {seq}, which is not there")
        for key in self._trained.keys() - self._judged:
            log.fail(f"step {self._trained[key].step} trains {named(key)}, which has no verdict")
        if ended and self._rules:
            want = self._rules[-1].steps
            most = max(rules.steps for rules in self._rules)  # a resume may ask for fewer than were done before it
            for what, count in (
                ("batches", len(self._eta)),
                ("steps done", self._steps),
                ("versions", len(self._published_s) - 1),
            ):
                log.checked += 1
                if not want <= count <= most:
                    log.fail(f"the run has ended with {count} {what} instead of {want}")
        self._totals.update({"steps": self._steps, "versions": len(self._published_s), "groups": len(self._groups)})
        return Report(ended, tuple(self.checks.values()), dict(self._totals), tuple(self._dead_letters))

    # ---- what decides

    def _control(self, entry: Entry) -> None:
        control = entry.message()
        assert isinstance(control, Control)
        if control.action == "start":
            self._resumed = True
        if control.action == "stop":
            self._ends.add(control.nonce)
            self._resumed = False
        elif control.action == "start":
            rules = self._rules_of(control, entry.time_s)
            if rules is not None:
                self._rules.append(rules)
            else:
                self._totals["starts of unknown rules"] += 1  # I1 and I6 are not held to the recipe's bounds then

    def _eta_at(self, time_s: float) -> int | None:
        """The largest η that was in force until then: an actor of an earlier start may still have been at work."""
        return max((r.max_staleness for r in self._rules if r.since_s <= time_s + CLOCK_SLACK_S), default=None)

    def _weights(self, entry: Entry) -> None:
        event, check = entry.message(), self.checks["I4"]
        assert isinstance(event, WeightVersion)
        check.checked += 1
        if entry.seq != event.version + 1:
            check.fail(f"version {event.version} stands at weights {entry.seq} instead of {event.version + 1}")
        self._published_s.setdefault(event.version, entry.time_s)
        digest = self._digest_of(event)
        if digest is not None:
            check.checked += 1
            self._totals["weight files compared"] += 1
            if digest != event.digest:
                check.fail(f"version {event.version} was announced as {event.digest}, {event.path} is {digest}")

    def _evaluation(self, entry: Entry) -> None:
        """Version 0 may be evaluated before it is announced: it is the model that the run begins with."""
        evaluation, log = entry.message(), self.checks["log"]
        assert isinstance(evaluation, Evaluation)
        log.checked += 1
        if evaluation.version and evaluation.version not in self._published_s:
            log.fail(f"evaluations {entry.seq} is of version {evaluation.version}, which was never announced")
        if evaluation.id in self._evaluated:
            log.fail(f"version {evaluation.version} is evaluated twice on {evaluation.data}")
        self._evaluated.add(evaluation.id)
        self._totals["evaluations"] += 1

    def _batch(self, entry: Entry) -> None:
        batch, once = entry.message(), self.checks["I3"]
        assert isinstance(batch, Batch)
        once.checked += 1
        if entry.seq != batch.step + 1:
            once.fail(f"batch {batch.step} stands at batches {entry.seq} instead of {batch.step + 1}")
        allowed = self._eta_at(entry.time_s)
        if allowed is not None and batch.max_staleness > allowed:
            self.checks["I1"].fail(f"batch {batch.step} allows η = {batch.max_staleness}, the recipe {allowed}")
        groups = set(batch.group_ids.tolist())
        self.checks["log"].checked += 1
        if self._rules and len(groups) != self._rules[0].batch_groups:
            self.checks["log"].fail(f"batch {batch.step} has {len(groups)} groups, not {self._rules[0].batch_groups}")
        self._trained_groups |= groups
        self._eta[batch.step] = batch.max_staleness
        for group, index, seq, reward, scored_seq in zip(
            batch.group_ids.tolist(),
            batch.indices.tolist(),
            batch.rollout_seqs.tolist(),
            batch.rewards.tolist(),
            batch.scored_seqs.tolist() or [0] * len(batch.rewards),
            strict=True,
        ):
            key = sample_key((group, index))
            once.checked += 1
            if key in self._trained:
                once.fail(f"{named(key)} is trained in step {self._trained[key].step} and in step {batch.step}")
                continue
            self._trained[key] = Trained(batch.step, seq, reward, scored_seq)
            self._key_at[seq] = key
        self._newest = batch
        self._newest_ended = {name for name, *_ in batch.dropped}
        self._newest_live = set(batch.live_groups.tolist())

    def _drop(self, entry: Entry) -> None:
        fields = fields_of(entry)
        key = sample_key((fields["group_id"], fields["index"]))
        if key in self._dropped_why:
            self._totals["duplicates"] += 1
            if not fields.get("worker"):
                self._given_up.discard(key)
            return
        if fields.get("worker"):
            self._given_up.add(key)
        self._dropped_why[key] = fields["reason"]
        self._totals["dropped tokens"] += fields["tokens"]
        drops = self._drops.setdefault(fields["group_id"], GroupDrops())
        drops.samples += 1
        drops.last_s = max(drops.last_s, entry.time_s)

    # ---- samples

    def _prompt(self, entry: Entry) -> None:
        sample, versions = entry.sample, entry.versions
        if sample is None or versions is None:
            raise MalformedMessage("no headers")
        key = sample_key(sample)
        self.checks["I3"].checked += 1
        if key in self._prompted:
            self.checks["I3"].fail(f"{named(key)} is admitted twice, again at prompts {entry.seq}")
            return
        self._prompted.add(key)
        if sample[0] not in self._groups:
            self._groups[sample[0]] = Group(entry.time_s, versions[0], fields_of(entry)["group_size"])
            if entry.seq <= self._gated_seq:
                self._gated.append(sample[0])

    def _partial(self, entry: Entry) -> None:
        fields, segments, tokens = self._tokens_of(entry)
        digest = prefix_digest(fields["tokens"], fields["logprobs"], segments, tokens)
        self._prefixes[entry.key] = Prefix(entry.time_s, tokens, digest)
        self._totals["partials"] += 1

    def _answer(self, entry: Entry) -> None:
        fields, segments, _ = self._tokens_of(entry)
        self._check_prefix(entry.id, entry, fields, segments)
        self._turns.answer(entry, fields, segments)

    def _rollout(self, entry: Entry) -> None:
        fields, segments, _ = self._tokens_of(entry)
        sample = (fields["group_id"], fields["index"])
        key = sample_key(sample)
        if entry.sample != sample:
            self.checks["log"].fail(f"rollouts {entry.seq} is {named(key)} and has the id {entry.id!r}")
        if key in self._rolled:
            self._totals["duplicates"] += 1
        self._rolled.add(key)
        group = self._groups.get(sample[0])
        if group is None:
            self.checks["log"].fail(f"{named(key)} was never admitted and stands at rollouts {entry.seq}")
        elif segments and min(segments)[0] < group.min_version:
            self.checks["I5"].fail(
                f"{named(key)} has tokens of version {min(segments)[0]}, its prompt asks for {group.min_version}"
            )
        self._check_prefix(named(key), entry, fields, segments)
        told = self._turns.rollout(entry, fields, segments)
        trained = self._key_at.pop(entry.seq, None)
        if trained is not None:
            self.checks["log"].checked += 1
            if trained != key:
                step = self._trained[trained].step
                self.checks["log"].fail(f"step {step} trains {named(trained)} from rollouts {entry.seq}: {named(key)}")
            self._check_ages(trained, model_segments(segments, told))

    def _tokens_of(self, entry: Entry) -> tuple[dict[str, Any], Segments, int]:
        """Fields, segments and token count of an entry with tokens, after checking that their tags can be true."""
        fields, check = fields_of(entry), self.checks["I5"]
        segments, tokens = segments_in(fields["segments"]), len(fields["tokens"]) // 4
        check.checked += 1
        where = f"{entry.id} at {entry.stream.name} {entry.seq}"
        covered = sum(count for _, count in segments)
        if covered != tokens or len(fields["logprobs"]) != 4 * tokens:
            check.fail(f"{where} has {tokens} tokens, {covered} tags and {len(fields['logprobs']) // 4} logprobs")
        if entry.versions != ((min(segments)[0], max(segments)[0]) if segments else None):
            check.fail(f"{where} has versions {entry.versions} in its header and {segments} inside")
        for version, _ in segments:
            published_s = self._published_s.get(version)
            if published_s is None or published_s > entry.time_s + CLOCK_SLACK_S:
                check.fail(f"{where} has tokens of version {version}, which was not published by then")
        return fields, segments, tokens

    def _check_prefix(self, name: str, entry: Entry, fields: dict[str, Any], segments: Segments) -> None:
        """Whoever finished a sample or a turn began with its kept prefix, if that stood there when he got it.

        It may have been stored after that: by a worker that was held to be dead and was only slow. `seconds` tell when
        the prompt came, up to how long it then took to store the rollout. An answer that was cut within the prefix, at
        a string that ends it, is not compared: the prefix's digest is over the whole of it.
        """
        if (prefix := self._prefixes.get(name)) is None:
            return
        if fields.get("stopped") and len(fields["tokens"]) // 4 < prefix.tokens:
            self._totals["partials cut"] += 1
            return
        self.checks["I5"].checked += 1
        kept = prefix_digest(fields["tokens"], fields["logprobs"], segments, prefix.tokens)
        if kept == prefix.digest:
            self._totals["partials continued"] += 1
            self._totals["tokens handed over"] += prefix.tokens
        elif prefix.stored_s + CLOCK_SLACK_S + PUBLISH_DEADLINE_S < entry.time_s - fields.get("seconds", 0.0):
            where = f"{name} at {entry.stream.name} {entry.seq}"
            self.checks["I5"].fail(f"{where} does not begin with its kept prefix of {prefix.tokens} tokens")
        else:
            self._totals["partials overtaken"] += 1

    def _check_ages(self, key: int, segments: Segments) -> None:
        step, check = self._trained[key].step, self.checks["I1"]
        for version, count in segments:
            age = step - version
            check.checked += count
            if age < 0:
                check.fail(f"step {step} trains {count} tokens of {named(key)} of the later version {version}")
            elif age <= self._eta[step]:
                self._ages[step][age] += count
                self._totals["trained tokens"] += count
            else:
                self._totals["masked tokens"] += count

    def _score(self, entry: Entry) -> None:
        fields = fields_of(entry)
        key = sample_key((fields["group_id"], fields["index"]))
        if key in self._judged:
            self._totals["duplicates"] += 1
            return
        self._judged.add(key)
        trained = self._trained.get(key)
        if trained is None:
            return
        self.checks["log"].checked += 1
        told = fields["reward"], fields["rollout_seq"]
        if told != (trained.reward, trained.rollout_seq):
            self.checks["log"].fail(
                f"step {trained.step} trains {named(key)} with reward {trained.reward} of rollouts "
                f"{trained.rollout_seq}; its verdict was {told[0]} on {told[1]}"
            )
        rewarded = len(fields.get("token_rewards", b"")) // FLOAT_BYTES
        tokens = sum(count for _, count in struct.iter_unpack("<ii", fields["segments"]))
        if rewarded not in (0, tokens):
            self.checks["log"].fail(f"{named(key)} has {rewarded} token rewards for {tokens} tokens")
        if trained.scored_seq != (entry.seq if rewarded else 0):
            self.checks["log"].fail(
                f"step {trained.step} trains {named(key)} with the process rewards of scored {trained.scored_seq}; its "
                f"own verdict is scored {entry.seq}, with {rewarded}"
            )

    def _step(self, entry: Entry) -> None:
        done, once = entry.message(), self.checks["I3"]
        assert isinstance(done, StepDone)
        self._steps += 1
        once.checked += 1
        if entry.seq != done.step + 1 or done.version != done.step + 1:
            once.fail(f"step {done.step} stands at steps {entry.seq} and made version {done.version}")
        self.checks["log"].checked += 1
        if done.step not in self._eta:
            self.checks["log"].fail(f"step {done.step} is done and has no batch")
        published_s = self._published_s.get(done.version)
        if published_s is None or published_s > entry.time_s + CLOCK_SLACK_S:
            self.checks["I4"].fail(f"step {done.step} is done, version {done.version} was not published by then")
        trained = {age: count for age, count in enumerate(done.staleness.tolist()) if count}
        self._turns.trained(done.step, sum(trained.values()), sum(self._ages[done.step].values()))
        if trained != dict(self._ages[done.step]):
            self.checks["I1"].fail(
                f"step {done.step} trained tokens by age {trained}, its batch allows {dict(self._ages[done.step])}"
            )

    def _dead(self, entry: Entry) -> None:
        self._totals["dead letters"] += 1
        if len(self._dead_letters) < DEAD_LETTERS_MAX:
            header = entry.headers
            place = f"{header.get(FROM_HEADER, '?')} {header.get(SEQ_HEADER, '?')}"
            self._dead_letters.append(f"{place} ({header.get(WAS_HEADER, '')}): {header.get(REASON_HEADER, '')}")

    # ---- at the end

    def _settle_samples(self, ended: bool) -> None:
        lost, once, log = self.checks["I2"], self.checks["I3"], self.checks["log"]
        for key in self._prompted:
            lost.checked += 1
            trained, dropped = self._trained.get(key), self._dropped_why.get(key)
            if trained is not None and key in self._given_up:  # by a worker that was held to be dead
                del self._dropped_why[key]
                self._totals["drops overtaken"] += 1
            elif trained is not None and dropped is not None:
                once.fail(f"{named(key)} is trained in step {trained.step} and dropped: {dropped}")
            if trained is None and dropped is None:
                self._totals["open"] += 1
                if ended:
                    lost.fail(f"{named(key)} was admitted and the run has ended without it")
                elif self._forgotten(key):
                    assert self._newest is not None
                    lost.fail(f"{named(key)} was admitted and batch {self._newest.step} knows it no more")
        for key in self._trained.keys() - self._prompted:
            lost.fail(f"{named(key)} is trained in step {self._trained[key].step} and was never admitted")
        for key in self._dropped_why.keys() - self._prompted:
            log.fail(f"{named(key)} is dropped and was never admitted")
        self._totals.update({"admitted": len(self._prompted), "trained": len(self._trained)})
        self._totals["dropped"] = len(self._dropped_why)
        self._totals.update({f"dropped: {why}": n for why, n in Counter(self._dropped_why.values()).items()})

    def _forgotten(self, key: int) -> bool:
        """Whether the newest batch says that a sample has ended: what had is in the log before a batch is."""
        newest, group = self._newest, group_of(key)
        if newest is None or group >= newest.next_group or group in self._newest_live:
            return False
        return named(key) not in self._newest_ended

    def _settle_gate(self) -> None:
        """Recount at each admission: groups admitted before, less those dropped by then, are live or trained.

        `min_version` is the newest version that the controller knew when it admitted the group.
        """
        check = self.checks["I6"]
        dropped_s = sorted(
            drops.last_s
            for group_id, drops in self._drops.items()
            if (group := self._groups.get(group_id)) is not None
            and drops.samples >= group.size
            and group_id not in self._trained_groups
        )
        for before, group_id in enumerate(self._gated):
            group = self._groups[group_id]
            time_s = group.admitted_s + CLOCK_SLACK_S
            check.checked += 1
            if self._published_s.get(group.min_version, float("inf")) > time_s:
                check.fail(f"group {group_id} was admitted under version {group.min_version} before it was published")
            eta = self._eta_at(group.admitted_s)
            if eta is None:
                continue
            bound = (eta + group.min_version + 1) * self._rules[0].batch_groups
            held = before - bisect.bisect_right(dropped_s, time_s)
            if held >= bound:
                check.fail(
                    f"group {group_id} was admitted with {held} groups live or trained; at version "
                    f"{group.min_version} and η = {eta} the bound is {bound}"
                )
