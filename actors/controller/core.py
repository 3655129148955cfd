"""The controller's core: a fold over the log, and the decisions that follow from it. Pure: no bus, no clock.

Facts come in by `saw_*`, decisions go out by `decide`; the actor publishes them. Every decision is either fenced
(prompts, batches) or follows from the log alone (drops), so that a successor, or a second controller, decides the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from actors.controller.batcher import Selection, select
from actors.controller.config import ControllerConfig
from actors.controller.failures import Failures
from actors.controller.groups import Group, answer_of
from actors.controller.pace import Formed, Pace, age_and_discarded
from schemas import Batch, Dropped, DropReason, Scored, sample_id


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Publish the prompts of these indices of a group, promising tokens of `min_version` or newer."""

    group_id: int
    indices: tuple[int, ...]
    min_version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """To be published, all of it, before the next is asked for. A batch comes alone, and after all drops before it.

    So when batch i stands in the log, every sample that is neither live nor in it has its terminal record: a successor
    folds from there and need not wonder about groups that it does not find.
    """

    batch: Batch | None = None
    drops: tuple[Dropped, ...] = ()
    admissions: tuple[Admission, ...] = ()

    def __bool__(self) -> bool:
        return self.batch is not None or bool(self.drops) or bool(self.admissions)


class ControllerCore:
    """State of the run as the log tells it. Live groups are those admitted and neither trained nor dropped."""

    def __init__(self, config: ControllerConfig, steps: int, last_batch: Batch | None = None) -> None:
        self.config = config
        self.steps = steps
        goal = config.pace_age if config.pace else None
        self.pace = Pace(config.batch_groups, config.group_size, config.max_staleness, goal)
        self.newest_version = -1  # no weights yet: nothing may be admitted
        self.next_step = last_batch.step + 1 if last_batch else 0
        self.next_group = last_batch.next_group if last_batch else 0
        self.live: dict[int, Group] = {}
        self.dropped_groups = 0
        self.overtaken = False  # a group was admitted that we know nothing of: fold anew before deciding anything
        self.paused = False
        self.unbegun_prompts = 0  # in the queue, taken by no worker: the actor looks now and then
        self._may_be_live = set(last_batch.live_groups.tolist()) if last_batch else set()
        self._fold_from = self.next_group
        self._drops: list[Dropped] = drops_of(last_batch) if last_batch else []
        self._read = {name: int(last_batch.marks.get(name, 1)) - 1 if last_batch else 0 for name in MARKS}
        self._seen = _Seen()
        self.failures = Failures(config.batch_groups * config.group_size)
        self._news = True  # something happened since a batch was last looked for

    # --- facts

    def saw_prompt(self, seq: int, group_id: int, index: int, min_version: int) -> None:
        """A prompt stands in the log: ours, or that of a predecessor."""
        self._read["prompts"] = max(self._read["prompts"], seq)
        if group_id < self._fold_from and group_id not in self._may_be_live:
            return  # it had ended when the last batch was formed
        group = self.live.get(group_id)
        if group is None:
            group = Group(group_id, self.config.group_size, min_version, first_prompt_seq=seq)
            self.live[group_id] = group
        group.prompted.add(index)
        self.next_group = max(self.next_group, group_id + 1)

    def saw_scored(self, seq: int, scored: Scored, stored_s: float = 0.0) -> None:
        """A verdict, stored at Unix second `stored_s`. Those on samples that have ended or are known are dropped:
        redeliveries beyond the window."""
        self._read["scored"] = max(self._read["scored"], seq)
        self._know(scored.group_id)
        group = self.live.get(scored.group_id)
        if group is None or scored.index in group.answers or scored.index in group.lost:
            return
        if group.first_scored_seq is None:
            group.first_scored_seq = seq
        self._seen.judge(scored.reward_digest)
        answer = answer_of(scored, seq, stored_s)
        if answer is not None:
            group.answers[scored.index] = answer
            self.failures.worked()
        elif scored.verdict != "scored":
            self._end_sample(group, scored.index, scored.verdict, scored.made, scored.detail)
        self._settle(group)

    def saw_malformed(self, group_id: int, index: int, detail: str) -> None:
        """A verdict that does not decode: its sample ends, since nobody would ever score it again."""
        group = self.live.get(group_id)
        if group is not None and index not in group.answers and index not in group.lost:
            self._end_sample(group, index, "dead_letter", 0, detail)
            self._settle(group)

    def saw_dropped(self, seq: int, dropped: Dropped) -> None:
        """Somebody ended a sample: a worker that could not handle it, or we."""
        self._read["dropped"] = max(self._read["dropped"], seq)
        self._know(dropped.group_id)
        group = self.live.get(dropped.group_id)
        if group is None:
            return
        if group.first_dropped_seq is None:
            group.first_dropped_seq = seq
        if dropped.index in group.lost:
            return
        group.answers.pop(dropped.index, None)
        group.lost.add(dropped.index)
        self._seen.lose(dropped.reason)
        if dropped.worker and dropped.reason == "filtered":
            self.failures.worked()  # its episode left it out by intent, before any verdict
        self.failures.lost(dropped.reason, dropped.detail)
        if dropped.reason == "stale":
            group.aged = self._news = True
            if len(group.lost) == group.size:
                self._end_group(group, "stale")
        elif dropped.reason in GROUP_REASONS and not dropped.worker:
            # A predecessor may have ended in the midst of ending the group. A worker speaks for the one sample.
            self._end_group(group, dropped.reason)
        else:
            self._settle(group)

    def _know(self, group_id: int) -> None:
        if group_id >= self.next_group:
            self.overtaken = True

    def saw_own_prompts(self, last_seq: int) -> None:
        """Our admissions stand in the log up to `last_seq`."""
        self._read["prompts"] = max(self._read["prompts"], last_seq)

    def saw_weights(self, version: int) -> None:
        """The trainer published a version."""
        self.newest_version = max(self.newest_version, version)

    # --- decisions

    @property
    def finished(self) -> bool:
        """Whether the last step's weights are published."""
        return self.newest_version >= self.steps

    @property
    def bound(self) -> int:
        """Most groups that may be live or trained now: `(η + v + 1) * B`, and never more than the run will train."""
        ahead = self.config.max_staleness + self.newest_version + 1 if self.newest_version >= 0 else 0
        return min(ahead, self.steps) * self.config.batch_groups

    @property
    def in_flight(self) -> int:
        """Groups between their admission and the trainer: live ones, and those of batches that wait for it."""
        waiting = max(0, self.next_step - 1 - max(0, self.newest_version))
        return len(self.live) + waiting * self.config.batch_groups

    @property
    def ready_groups(self) -> int:
        """Live groups whose samples are all scored or dropped."""
        return sum(group.complete for group in self.live.values())

    def decide(self) -> Decision:
        """What follows from the facts so far. The caller publishes it and asks again, until there is nothing."""
        if not self._drops and (batch := self._form_batch()) is not None:
            return Decision(batch)
        if self.next_step >= self.steps:
            for group in list(self.live.values()):
                self._end_group(group, "run_ended")
        if self._drops:
            drops, self._drops = tuple(self._drops), []
            return Decision(drops=drops)
        return Decision(admissions=self._admit())

    def _admit(self) -> tuple[Admission, ...]:
        out = []
        for group in self.live.values():  # a predecessor ended in the midst of a group
            missing = tuple(index for index in range(group.size) if index not in group.prompted)
            if missing:
                out.append(Admission(group.group_id, missing, group.min_version))
                group.prompted.update(missing)
        trained = self.next_step * self.config.batch_groups
        while not self.paused and self.in_flight < self.pace.limit and len(self.live) + trained < self.bound:
            group = Group(
                self.next_group, self.config.group_size, self.newest_version, first_prompt_seq=self._read["prompts"] + 1
            )
            group.prompted.update(range(group.size))
            self.live[group.group_id] = group
            self.next_group += 1
            out.append(Admission(group.group_id, tuple(range(group.size)), group.min_version))
        return tuple(out)

    def _form_batch(self) -> Batch | None:
        step = self.next_step
        # One batch ahead of the trainer: it finds the next one when it is done, and no more grows old in the queue.
        if not self._news or step >= self.steps or self.newest_version < step - 1:
            return None
        config = self.config
        selection = select(self.live.values(), step, config.batch_groups, config.max_staleness, config.on_stale)
        for group in selection.dead:
            self._end_group(group, "stale")
        if self._drops or not selection.groups:
            self._news = bool(self._drops)
            return None
        formed = self._formed(step, selection)
        batch = self._batch(step, selection)
        self.next_step += 1
        self._drops.extend(drops_of(batch))
        self._seen = _Seen(self._seen.digest)
        self.failures.begin()
        self.pace.batch_formed(formed)
        return batch

    def _batch(self, step: int, selection: Selection) -> Batch:
        rows: list[tuple[Group, int]] = []
        dropped: list[list[str]] = []
        for group in selection.groups:
            stale = set(selection.stale.get(group.group_id, ()))
            dropped.extend(
                [sample_id(group.group_id, index), "stale", str(group.answers[index].length)] for index in stale
            )
            rows.extend((group, index) for index in sorted(group.answers) if index not in stale)
            self._seen.count(group)
            del self.live[group.group_id]
        answers = [group.answers[index] for group, index in rows]
        scored_seqs = [answer.process_seq for answer in answers]
        return Batch(
            step=step,
            max_staleness=self.config.max_staleness,
            group_ids=np.array([group.group_id for group, _ in rows], "<i8"),
            indices=np.array([index for _, index in rows], "<i4"),
            rollout_seqs=np.array([answer.rollout_seq for answer in answers], "<i8"),
            rewards=np.array([answer.reward for answer in answers], "<f8"),
            next_group=self.next_group,
            live_groups=np.array(sorted(self.live), "<i8"),
            marks=self._marks(),
            dropped=dropped,
            seen=self._seen.means(),
            lengths=np.array([answer.prompt_length + answer.length + answer.observed for answer in answers], "<i4"),
            last_scored_s=max((answer.scored_s for answer in answers), default=0.0),
            scored_seqs=np.array(scored_seqs if any(scored_seqs) else (), "<i8"),
        )

    def _formed(self, step: int, selection: Selection) -> Formed:
        """What the pace goes by. Samples that were dropped for their age count all as too old."""
        config = self.config
        segments = [answer.segments for group in selection.groups for answer in group.answers.values()]
        age, too_old = age_and_discarded(step, config.max_staleness, segments)
        lost = self._seen.dropped.get("stale", 0)
        return Formed(
            age=age,
            discarded=(too_old * len(segments) + lost) / max(1, len(segments) + lost),
            trainer_waited=self.newest_version >= step,
            ready_left=self.ready_groups - len(selection.groups),
            unbegun=self.unbegun_prompts,
        )

    def _marks(self) -> dict[str, float]:
        """From which sequence on each stream concerns live groups."""
        marks = {name: seq + 1 for name, seq in self._read.items()}
        for group in self.live.values():
            marks["prompts"] = min(marks["prompts"], group.first_prompt_seq)
            if group.first_scored_seq is not None:
                marks["scored"] = min(marks["scored"], group.first_scored_seq)
            if group.first_dropped_seq is not None:
                marks["dropped"] = min(marks["dropped"], group.first_dropped_seq)
        return {name: float(seq) for name, seq in marks.items()}

    def _settle(self, group: Group) -> None:
        """End a complete group that is not worth training."""
        if not group.complete:
            return
        self._news = True
        if group.aged:
            return
        if len(group.answers) < group.fewest:
            self._end_group(group, "group_too_small")
        elif self.config.filter == "zero_variance" and group.zero_variance:
            self._end_group(group, "zero_variance")

    def _end_sample(self, group: Group, index: int, reason: DropReason, tokens: int, detail: str = "") -> None:
        group.lost.add(index)
        self._seen.lose(reason)
        self.failures.lost(reason, detail)
        self._drops.append(Dropped(group_id=group.group_id, index=index, reason=reason, tokens=tokens, detail=detail))

    def _end_group(self, group: Group, reason: DropReason) -> None:
        """Drop what is left of a group. Samples still on their way end too; their verdicts will find nobody."""
        self._seen.count(group)
        for index in range(group.size):
            if index not in group.lost:
                answer = group.answers.get(index)
                self._end_sample(group, index, reason, answer.length if answer else 0)
        del self.live[group.group_id]
        self.dropped_groups += 1


MARKS = ("prompts", "scored", "dropped")


# These end a whole group; other reasons end one sample.
GROUP_REASONS: frozenset[DropReason] = frozenset({"zero_variance", "filtered", "group_too_small", "run_ended"})


class _Seen:
    """Statistics of the groups that ended since the last batch: trained, or filtered, which alone would be a bias."""

    def __init__(self, digest: str | None = None) -> None:
        """`digest` is of the reward function that gave the last verdict before: it may change between batches."""
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.zero_variance = 0
        self.dropped: dict[str, int] = {}  # samples, by reason
        self.digest = digest
        self.digests = {digest} if digest is not None else set()

    def judge(self, digest: str) -> None:
        """A verdict came, by the reward function of this digest."""
        self.digest = digest
        self.digests.add(digest)

    def lose(self, reason: DropReason) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def count(self, group: Group) -> None:
        self.rewards.extend(answer.reward for answer in group.answers.values())
        self.lengths.extend(answer.length for answer in group.answers.values())
        self.zero_variance += group.zero_variance

    def means(self) -> dict[str, float]:
        n = len(self.rewards)
        out: dict[str, float] = {
            "samples": n,
            "reward": sum(self.rewards) / n if n else 0.0,
            "response_length": sum(self.lengths) / n if n else 0.0,
            "response_length_max": max(self.lengths, default=0),
            "zero_variance_groups": self.zero_variance,
        }
        if len(self.digests) > 1:  # the function was changed in between
            out["reward_digests"] = len(self.digests)
        out.update({f"dropped/{reason}": count for reason, count in self.dropped.items()})
        return out


def drops_of(batch: Batch) -> list[Dropped]:
    """The terminal records of the samples that a batch ended without training them."""
    out = []
    for name, reason, tokens in batch.dropped:
        group_id, index = map(int, name.split("-"))
        out.append(
            Dropped(group_id=group_id, index=index, reason=reason, tokens=int(tokens))  # type: ignore[arg-type]
        )
    return out
