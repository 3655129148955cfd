"""An audit that believed what a rollout says of its turns would prove nothing: lies about them are planted here."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest

from bus.table import PUBLISH_DEADLINE_S, ROLLOUTS, SCORED, STEPS
from schemas import Answer, Partial, StepDone, Turn
from tests.ops.sound_log import Log, whole_run
from tests.ops.test_audit import broken

SEQ = 1  # sample 0-0, of five tokens, trained in step 0


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def changed(log: Log, **fields: Any) -> Log:
    """The rollout as bytes that no sound program would write."""
    old = log.entries[ROLLOUTS.name][SEQ - 1]
    name, version, told = msgpack.unpackb(old.data)
    data = msgpack.packb([name, version, {**told, **fields}])
    log.entries[ROLLOUTS.name][SEQ - 1] = dataclasses.replace(old, data=data)
    return log


def trajectory(staleness: list[int]) -> Log:
    """Two tokens of 0-0 were told to the model; step 0 says that it trained so many."""
    log = whole_run()
    logprobs = np.array([-0.5, 0, 0, -0.5, -0.5])
    log.replace(ROLLOUTS, SEQ, observations=[1, 2], logprobs=logprobs, prompt_tokens=[1, 2], sequences=[1, 4, 1, 1])
    log.replace(SCORED, 1, observations=[1, 2])
    log.replace(STEPS, 1, staleness=staleness)
    return log


def trained(log: Log) -> int:
    done = log.entries[STEPS.name][0].message()
    assert isinstance(done, StepDone)
    return int(done.staleness.sum())


def test_a_step_that_trains_the_models_own_tokens_is_sound_and_one_that_trains_more_is_not() -> None:
    whole = trained(whole_run())
    sound = trajectory([whole - 2]).audit()
    assert broken(sound) == {}
    assert sound.totals["observed tokens"] == 2
    words = broken(trajectory([whole]).audit())
    assert words["turns"] == [f"step 0 trained {whole} tokens; the model made {whole - 2} that are young enough"]
    assert "I1" in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"observations": ints(1, 2)}, "logprobs must be 0 at observations"),
        ({"observations": ints(1, 9)}, "within 5 tokens"),
        ({"observations": ints(-3, 2)}, "within 5 tokens"),
        ({"observations": ints(0, 5)}, "the model made none"),
        ({"observations": ints(1)}, "must be pairs"),
        ({"sequences": ints(1, 4)}, "must cut up 1 prompt tokens and 5 tokens"),
        ({"sequences": ints(1, 5, 0, 0)}, "at least 1 each"),
    ],
)
def test_a_lie_about_turns_is_named_and_stops_no_audit(fields: dict[str, bytes], words: str) -> None:
    report = changed(whole_run(), **fields).audit()
    (what,) = broken(report)["turns"]
    assert what.startswith("0-0 at rollouts 1: rollout.")
    assert words in what
    assert "malformed entries" not in report.totals


def test_spans_beside_tags_that_do_not_fit_stop_no_audit() -> None:
    report = changed(whole_run(), observations=ints(1, 2), segments=ints(0, 3)).audit()
    assert "I5" in broken(report)
    assert "malformed entries" not in report.totals


def answered(**fields: Any) -> Log:
    """A turn of 0-0 with a kept prefix of four tokens, and its answer long after that."""
    log = whole_run()
    turn = Turn(group_id=0, index=0, number=0, prompt_tokens=np.array([1]), stop=["."], seed=0, min_version=0)
    made = {"group_id": 0, "index": 0, "turn": turn.id, "segments": [(0, 4)], "tokens": np.arange(4)}
    log.put(turn)
    log.put(Partial(**made, logprobs=np.full(4, -0.5), worker="rollout-0"))
    log.now_s += 2 * PUBLISH_DEADLINE_S
    cut = {"segments": [(0, 3)], "tokens": np.arange(3), "logprobs": np.full(3, -0.5)}
    log.put(Answer(**made | cut | fields, finish="stop", text="a", seconds=0.5))
    return log


def test_an_answer_that_a_string_ended_within_its_kept_prefix_is_no_breach() -> None:
    """The worker that kept it had not looked yet; the one that went on with it ends the answer where the string is."""
    report = answered(stopped=".").audit()
    assert broken(report) == {}
    assert report.totals["partials cut"] == 1


def test_an_answer_that_lost_its_kept_prefix_is_a_breach_though_a_string_ended_it() -> None:
    longer = {"segments": [(0, 5)], "tokens": np.arange(5)[::-1], "logprobs": np.full(5, -0.5)}
    for fields in ({}, {"stopped": "."} | longer):
        assert "kept prefix of 4 tokens" in str(broken(answered(**fields).audit())["I5"])
