"""The audit is what proves a run sound, so each promise is broken here on purpose, and the breach must be named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest

from bus.memory import MemoryBus, MemoryHub
from bus.port import Entry, dead_letter_headers
from bus.table import (
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    PARTIALS,
    PROMPTS,
    PUBLISH_DEADLINE_S,
    ROLLOUTS,
    SCORED,
    STEPS,
    WEIGHTS,
)
from ops.audit import _rules_of, audit_log, audit_run, main
from ops.findings import Report, Rules
from ops.invariants import READ_ORDER, Auditor
from ops.log_source import RunLog
from ops.nats_server import NatsServer
from ops.raw_entries import first_tokens, segments_in
from schemas import (
    Batch,
    Control,
    Dropped,
    UserError,
)
from tests.ops.sound_log import ETA, RUN, SIZE, STEPS_PLANNED, Log, evaluation, prompts, stored_run, whole_run


def broken(report: Report) -> dict[str, list[str]]:
    return {check.name: check.examples for check in report.checks if check.broken}


def test_a_sound_log_is_clean_and_counted() -> None:
    """False alarms would teach people to ignore the audit."""
    report = whole_run().audit()
    assert broken(report) == {}
    assert report.ended
    assert all(check.checked for check in report.checks)
    totals = report.totals
    assert (totals["admitted"], totals["trained"], totals["dropped"], totals["dropped: zero_variance"]) == (
        14,
        12,
        2,
        2,
    )
    assert totals["trained tokens"] + totals.get("masked tokens", 0) == 12 * 5
    assert totals["partials continued"] == 1
    assert "open" not in totals


def test_what_is_still_at_work_is_open_and_not_lost() -> None:
    """A run may be audited while it goes on, or after Ctrl-C."""
    report = whole_run(steps=1).audit()
    assert broken(report) == {}
    assert not report.ended
    assert report.totals["open"] == report.totals["admitted"] - report.totals["trained"] - report.totals["dropped"] > 0


def trains_the_future(log: Log) -> None:
    log.replace(ROLLOUTS, 1, segments=[(1, 5)])


def trains_what_is_too_old(log: Log) -> None:
    log.replace(STEPS, 3, staleness=[10, 10, 5])


def allows_more_than_the_recipe(log: Log) -> None:
    log.replace(BATCHES, 2, max_staleness=ETA + 1)


def loses_a_drop(log: Log) -> None:
    log.remove(DROPPED, 2)


def trains_what_nobody_admitted(log: Log) -> None:
    log.remove(PROMPTS, 1)


def trains_a_sample_twice(log: Log) -> None:
    log.replace(BATCHES, 2, group_ids=[0, 3, 4, 4], indices=[0, 1, 0, 1])


def trains_and_drops(log: Log) -> None:
    log.put(Dropped(group_id=3, index=1, reason="error"))


def drops_what_a_worker_gave_up(log: Log) -> None:
    log.put(Dropped(group_id=3, index=1, reason="error", worker="episode-0"))
    log.put(Dropped(group_id=3, index=1, reason="error"))


def forms_a_batch_twice(log: Log) -> None:
    log.put(log.entries["batches"][1].message())


def admits_a_sample_twice(log: Log) -> None:
    log.put(prompts(2, 3)[0])


def does_a_step_twice(log: Log) -> None:
    log.put(log.entries["steps"][1].message())


def skips_a_version(log: Log) -> None:
    log.replace(WEIGHTS, 3, version=3, path="v3")


def finishes_a_step_before_its_weights(log: Log) -> None:
    entries = log.entries["steps"]
    entries[1] = dataclasses.replace(entries[1], time_s=log.entries["weights"][2].time_s - 1.0)


def tags_tokens_with_a_version_to_come(log: Log) -> None:
    log.replace(ROLLOUTS, 2, segments=[(0, 4), (2, 1)])


def lies_in_the_header(log: Log) -> None:
    old = log.entries["rollouts"][1]
    log.entries["rollouts"][1] = dataclasses.replace(old, headers={**old.headers, "Rs-Versions": "0-1"})


def tags_fewer_tokens_than_there_are(log: Log) -> None:
    old = log.entries["rollouts"][1]
    kind, version, fields = msgpack.unpackb(old.data)
    fields["segments"] = np.array([(0, 4)], "<i4").tobytes()
    log.entries["rollouts"][1] = dataclasses.replace(old, data=msgpack.packb([kind, version, fields]))


def samples_from_older_weights_than_promised(log: Log) -> None:
    group = next(entry.sample for entry in log.entries["prompts"] if entry.versions == (1, 1))
    seq = next(entry.seq for entry in log.entries["rollouts"] if entry.sample == group)
    log.replace(ROLLOUTS, seq, segments=[(0, 5)])


def takes_the_prompt_long_after_the_prefix(log: Log) -> None:
    old = log.entries["rollouts"][1]
    log.entries["rollouts"][1] = dataclasses.replace(old, time_s=old.time_s + PUBLISH_DEADLINE_S)


def forgets_the_tokens_of_a_worker_that_left(log: Log) -> None:
    log.replace(ROLLOUTS, 2, tokens=[9, 1, 2, 3, 4])
    takes_the_prompt_long_after_the_prefix(log)


def changes_the_logprobs_of_a_kept_prefix(log: Log) -> None:
    log.replace(ROLLOUTS, 2, logprobs=[-0.5, -0.25, -0.5, -0.5, -0.5])
    takes_the_prompt_long_after_the_prefix(log)


def retags_a_kept_prefix(log: Log) -> None:
    log.replace(PARTIALS, 1, segments=[(0, 1), (1, 1)])
    takes_the_prompt_long_after_the_prefix(log)


def admits_over_the_bound(log: Log) -> None:
    for i, entry in enumerate(log.entries["prompts"]):
        if entry.sample == (5, 0):
            log.replace(PROMPTS, i + 1, min_version=0)


def admits_before_its_version(log: Log) -> None:
    log.entries["weights"][1] = dataclasses.replace(log.entries["weights"][1], time_s=log.now_s)


def names_the_rollout_of_another_sample(log: Log) -> None:
    log.replace(BATCHES, 1, rollout_seqs=[2, 1, 3, 4])


def names_a_rollout_that_is_not_there(log: Log) -> None:
    log.replace(BATCHES, 1, rollout_seqs=[1, 2, 3, 99])


def trains_another_reward_than_was_given(log: Log) -> None:
    log.replace(BATCHES, 1, rewards=[0.0, 1.0, 0.5, 1.0])


def trains_without_a_verdict(log: Log) -> None:
    log.remove(SCORED, 3)


def drops_what_nobody_admitted(log: Log) -> None:
    log.put(Dropped(group_id=77, index=0, reason="error"))


def comes_from_a_newer_program(log: Log) -> None:
    kind, version, fields = msgpack.unpackb(log.entries["rollouts"][1].data)
    log.entries["rollouts"][1] = dataclasses.replace(
        log.entries["rollouts"][1], data=msgpack.packb([kind, version + 1, fields])
    )


def evaluates_what_was_never_announced(log: Log) -> None:
    log.put(evaluation(STEPS_PLANNED + 1))


def evaluates_a_version_twice(log: Log) -> None:
    log.put(evaluation(STEPS_PLANNED))


def ends_one_step_early(log: Log) -> None:
    log.entries["steps"].pop()


def test_a_batch_is_the_last_word_on_what_a_worker_has_given_up() -> None:
    """One that was held to be dead ends an episode otherwise than its successor; found by simulation."""
    log = whole_run()
    before = log.audit()
    log.put(Dropped(group_id=3, index=1, reason="error", worker="episode-0"))
    after = log.audit()
    assert broken(after) == {}
    assert after.totals["dropped"] == before.totals["dropped"]
    assert after.totals["drops overtaken"] == 1


@pytest.mark.parametrize(
    ("breach", "invariant", "words"),
    [
        (trains_the_future, "I1", "step 0 trains 5 tokens of 0-0 of the later version 1"),
        (trains_what_is_too_old, "I1", "step 2 trained tokens by age"),
        (allows_more_than_the_recipe, "I1", "batch 1 allows η = 2, the recipe 1"),
        (loses_a_drop, "I2", "1-1 was admitted and the run has ended without it"),
        (trains_what_nobody_admitted, "I2", "0-0 is trained in step 0 and was never admitted"),
        (trains_a_sample_twice, "I3", "0-0 is trained in step 0 and in step 1"),
        (trains_and_drops, "I3", "3-1 is trained in step 1 and dropped: error"),
        (drops_what_a_worker_gave_up, "I3", "3-1 is trained in step 1 and dropped: error"),
        (forms_a_batch_twice, "I3", "batch 1 stands at batches 4 instead of 2"),
        (admits_a_sample_twice, "I3", "2-0 is admitted twice"),
        (does_a_step_twice, "I3", "step 1 stands at steps 4"),
        (skips_a_version, "I4", "version 3 stands at weights 3 instead of 4"),
        (finishes_a_step_before_its_weights, "I4", "step 1 is done, version 2 was not published by then"),
        (tags_tokens_with_a_version_to_come, "I5", "has tokens of version 2, which was not published by then"),
        (lies_in_the_header, "I5", "has versions (0, 1) in its header"),
        (tags_fewer_tokens_than_there_are, "I5", "has 5 tokens, 4 tags and 5 logprobs"),
        (samples_from_older_weights_than_promised, "I5", "has tokens of version 0, its prompt asks for 1"),
        (forgets_the_tokens_of_a_worker_that_left, "I5", "0-1 at rollouts 2 does not begin with its kept prefix"),
        (changes_the_logprobs_of_a_kept_prefix, "I5", "0-1 at rollouts 2 does not begin with its kept prefix"),
        (retags_a_kept_prefix, "I5", "0-1 at rollouts 2 does not begin with its kept prefix"),
        (admits_over_the_bound, "I6", "group 5 was admitted with 4 groups live or trained"),
        (admits_before_its_version, "I6", "group 5 was admitted under version 1 before it was published"),
        (names_the_rollout_of_another_sample, "log", "step 0 trains 0-1 from rollouts 1: 0-0"),
        (names_a_rollout_that_is_not_there, "log", "from rollouts 99, which is not there"),
        (trains_another_reward_than_was_given, "log", "step 0 trains 2-0 with reward 0.5"),
        (trains_without_a_verdict, "log", "step 0 trains 2-0, which has no verdict"),
        (drops_what_nobody_admitted, "log", "77-0 is dropped and was never admitted"),
        (
            comes_from_a_newer_program,
            "log",
            "rollouts 2 cannot be checked: rollout has version 2, of a newer Rollstream",
        ),
        (evaluates_what_was_never_announced, "log", "evaluations 3 is of version 4, which was never announced"),
        (evaluates_a_version_twice, "log", "version 3 is evaluated twice on held-out"),
        (ends_one_step_early, "log", "the run has ended with 2 steps done instead of 3"),
    ],
)
def test_a_breach_is_found_and_named(breach: Callable[[Log], None], invariant: str, words: str) -> None:
    """One planted fault each, of every kind that the audit promises to find."""
    log = whole_run()
    breach(log)
    found = broken(log.audit())
    assert any(words in what for what in found.get(invariant, [])), found


def test_a_sample_that_the_newest_batch_knows_no_more_is_lost_though_the_run_goes_on() -> None:
    """A successor folds from the newest batch: whom that forgets, nobody will ever end."""
    log = whole_run(steps=1)
    (batch,) = log.entries["batches"]
    message = batch.message()
    assert isinstance(message, Batch)
    live = message.live_groups.tolist()
    log.replace(BATCHES, 1, live_groups=live[1:])
    assert broken(log.audit()) == {
        "I2": [f"{live[0]}-{index} was admitted and batch 0 knows it no more" for index in range(SIZE)]
    }
    # What the batch's own decision ended may not be stored yet: the successor stores it from the batch.
    log.replace(BATCHES, 1, dropped=[[f"{live[0]}-{index}", "stale", "3"] for index in range(SIZE)])
    assert broken(log.audit()) == {}


def test_bytes_that_are_not_those_announced_are_found() -> None:
    """I4: whoever loads such weights trains and samples from a policy that nobody made."""
    found = broken(whole_run().audit(digest="sha256-2"))
    assert len(found["I4"]) == 3
    assert "version 0 was announced as sha256-0" in found["I4"][0]


def test_a_redelivered_message_is_counted_and_no_breach() -> None:
    """Consumers deliver at least once: beyond the broker's window the second writing of a sample is stored."""
    log = whole_run()
    for stream in ("rollouts", "scored", "dropped"):
        log.put(log.entries[stream][0].message())
    report = log.audit()
    assert broken(report) == {}
    assert report.totals["duplicates"] == 3


def test_a_prefix_stored_by_a_worker_that_was_held_to_be_dead_is_no_breach() -> None:
    """It was only slow: the prompt was with another worker by then, who could not know that prefix."""
    log = whole_run()
    log.replace(ROLLOUTS, 2, tokens=[9, 1, 2, 3, 4])
    (partial,) = log.entries["partials"]
    log.entries["partials"] = [dataclasses.replace(partial, time_s=log.entries["rollouts"][1].time_s - 0.4)]
    report = log.audit()
    assert broken(report) == {}
    assert report.totals["partials overtaken"] == 1


def test_a_rollout_that_was_long_on_its_way_to_the_log_is_no_breach() -> None:
    """Its `seconds` end with its last token. Found by simulation: a prefix was stored while the rollout was retried."""
    log = whole_run()
    log.replace(ROLLOUTS, 2, tokens=[9, 1, 2, 3, 4])
    old = log.entries["rollouts"][1]
    log.entries["rollouts"][1] = dataclasses.replace(old, time_s=old.time_s + PUBLISH_DEADLINE_S / 2)
    report = log.audit()
    assert broken(report) == {}
    assert report.totals["partials overtaken"] == 1


def test_a_run_that_was_resumed_after_its_end_has_not_ended_though_its_rules_are_unknown() -> None:
    """Its samples are at work and not lost. Found by simulation, in audits of running logs."""
    log = whole_run()
    log.put(Control(action="start", nonce="again", recipe="of a newer program"))
    for prompt in prompts(90, 9):
        log.put(prompt)
    auditor = Auditor()
    for stream in READ_ORDER:
        for entry in log.entries[stream.name]:
            auditor.feed(entry)
    report = auditor.report()
    assert not report.ended
    assert report.totals["open"] == SIZE


def test_dead_letters_are_listed_and_bytes_that_do_not_decode_counted() -> None:
    """A malformed message is no breach as long as its sample has an end."""
    log = whole_run()
    junk = Entry(ROLLOUTS, 13, "", {"Nats-Msg-Id": "junk"}, b"\xc1", log.now_s)
    log.entries["rollouts"].append(junk)
    headers = dead_letter_headers(RUN, junk, "not msgpack")
    log.entries["dead"].append(Entry(DEAD, 1, "rollouts", headers, junk.data, log.now_s))
    report = log.audit()
    assert report.clean
    assert report.totals["malformed entries"] == 1
    assert report.dead_letters == ("rollouts 13 (junk): not msgpack",)


def test_segments_are_joined_and_cut_token_by_token() -> None:
    """A worker that goes on under the version of the prefix writes one segment or two: the tags are the same."""
    assert segments_in(np.array([(3, 2), (3, 4), (5, 1)], "<i4").tobytes()) == ((3, 6), (5, 1))
    assert first_tokens(((3, 6), (5, 2)), 7) == ((3, 6), (5, 1))
    assert first_tokens(((3, 6), (5, 2)), 6) == ((3, 6),)


async def test_the_log_on_a_bus_is_read_to_its_end_and_a_purged_one_refused(tmp_path: Path) -> None:
    """The same checkers behind the port that all actors use."""
    bus = MemoryBus(RUN, MemoryHub())
    await bus.setup()
    log = whole_run()
    for entry in sorted((e for entries in log.entries.values() for e in entries), key=lambda e: e.time_s):
        await bus.publish(entry.message())
    audit = await audit_log(RunLog(bus, tmp_path, ""))
    assert audit.clean, audit.to_json()
    assert audit.entries == sum(len(entries) for entries in log.entries.values())
    await bus.purge(PROMPTS, 3)
    with pytest.raises(UserError, match="prompts of run audited begin at 3"):
        await audit_log(RunLog(bus, tmp_path, ""))


async def test_a_run_folder_is_audited_while_its_server_runs_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rollstream audit` needs no running run, and its exit status tells scripts what it found."""
    folder = tmp_path / RUN
    folder.mkdir()
    server = NatsServer()
    bus = await stored_run(folder, server)
    live = await audit_run(folder)
    assert live.report.checks[0].checked == 60
    await bus.publish(Dropped(group_id=3, index=1, reason="error"))
    await bus.close()
    await server.stop()
    assert await main(str(folder), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["report"]["totals"]["admitted"] == 14
    assert await main(str(folder), as_json=False) == 1
    shown = capsys.readouterr().out
    assert "I3: 3-1 is trained in step 1 and dropped: error" in shown
    assert "INVARIANTS ARE BROKEN" in shown
    await server.start(folder)  # the audit has given the folder free
    await server.stop()


def test_a_resume_that_asks_for_fewer_steps_than_were_done_breaks_nothing() -> None:
    """Who stops early resumes with a smaller `steps`, to get the model and the summary; no start asked for more."""
    log = Log()
    for message in [entry.message() for entries in whole_run().entries.values() for entry in entries]:
        ends = isinstance(message, Control) and message.action == "stop"
        log.put(Control(action="start", nonce="resumed") if ends else message)
    log.put(Control(action="stop", nonce=f"end-{STEPS_PLANNED - 1}"))
    assert broken(log.audit(planned=(STEPS_PLANNED, STEPS_PLANNED - 1))) == {}
    assert "3 steps done instead of 2" in str(broken(log.audit(planned=(STEPS_PLANNED - 1,))))


def test_rules_are_read_from_recipes_of_other_versions_and_what_is_not_understood_is_told() -> None:
    """A recording is audited by later programs; a key that they do not know must not blind them to the bounds."""
    known = "a_key_to_come: 5\nsteps: 3\ncontroller: {max_staleness: 1, batch_groups: 2, another: {}}\n"
    for recipe, rules, unknown in (
        (known, Rules(9.0, 1, 2, 3), 0),
        ("steps: [", None, 1),
        ("5", None, 1),
        ("", None, 1),
    ):
        control = Control(action="start", nonce="a", recipe=recipe)
        assert _rules_of(control, 9.0) == rules
        log = whole_run()
        log.replace(CONTROL, 1, recipe=recipe)
        auditor = Auditor(_rules_of)
        for stream in READ_ORDER:
            for entry in log.entries[stream.name]:
                auditor.feed(entry)
        report = auditor.report()
        assert report.totals.get("starts of unknown rules", 0) == unknown
        assert broken(report) == {}
