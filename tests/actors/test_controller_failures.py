"""A run of which nothing but failures comes must end with the reason; one that filters, waits or is slow must not."""

from __future__ import annotations

import dataclasses

import pytest

from actors.controller.config import ControllerConfig
from actors.controller.core import ControllerCore
from actors.controller.failures import FAILED_MIN, Failures
from schemas import Dropped, DropReason, UserError


def ended_by(failures: Failures, *samples: tuple[int, DropReason | None]) -> str:
    """What it says after so many samples of each reason, None for those that were scored; empty if the run goes on."""
    for count, reason in samples:
        for _ in range(count):
            if reason is None:
                failures.worked()
            else:
                failures.lost(reason, "no such table: words")
            try:
                failures.check()
            except UserError as error:
                return str(error)
    return ""


def test_a_run_that_once_worked_ends_when_nothing_but_failures_comes_and_names_the_newest() -> None:
    failures = Failures(batch_samples=16)
    assert ended_by(failures, (40, None)) == ""
    failures.begin()
    assert ended_by(failures, (FAILED_MIN - 1, "error")) == ""
    assert "error: no such table: words" in ended_by(failures, (1, "error"))


@pytest.mark.parametrize(
    "samples",
    [
        [(100_000, "zero_variance"), (100_000, "stale"), (100_000, "filtered"), (100_000, "group_too_small")],
        [(FAILED_MIN - 1, "error"), (FAILED_MIN, None), (3 * FAILED_MIN, "timeout")],  # four of five
        [(FAILED_MIN - 1, "invalid")],
    ],
    ids=["by intent", "some come through", "few so far"],
)
def test_what_is_left_out_by_intent_and_what_still_gets_on_ends_no_run(samples: list[tuple[int, DropReason]]) -> None:
    assert ended_by(Failures(16), *samples) == ""


def test_a_large_batch_is_waited_for_longer() -> None:
    assert ended_by(Failures(1000), (999, "error")) == ""
    assert ended_by(Failures(1000), (1000, "error"))


def test_what_an_episode_leaves_out_by_intent_counts_as_what_worked() -> None:
    core = ControllerCore(ControllerConfig(batch_groups=1, group_size=2 * FAILED_MIN, max_staleness=1), steps=4)
    core.saw_weights(0)
    (admission, *_) = core.decide().admissions
    for index in range(2 * FAILED_MIN):
        reason: DropReason = "filtered" if index % 2 else "error"
        core.saw_dropped(
            index + 1, Dropped(group_id=admission.group_id, index=index, reason=reason, worker="episode-0")
        )
    core.failures.check()


def test_each_failed_sample_counts_once_however_often_the_log_tells_of_it_and_a_batch_begins_anew() -> None:
    core = ControllerCore(ControllerConfig(batch_groups=1, group_size=FAILED_MIN, max_staleness=1), steps=4)
    core.saw_weights(0)
    (admission, *_) = core.decide().admissions
    dropped = Dropped(group_id=admission.group_id, index=0, reason="error", detail="it is odd")
    for seq in range(2 * FAILED_MIN):
        core.saw_dropped(seq + 1, dropped)
    core.failures.check()
    for index in range(1, FAILED_MIN):
        core.saw_dropped(1000 + index, dataclasses.replace(dropped, index=index))
    with pytest.raises(UserError, match=f"{FAILED_MIN} of the {FAILED_MIN} .* error: it is odd"):
        core.failures.check()
    core.failures.begin()
    core.failures.check()
