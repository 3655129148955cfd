"""A worker that is asked to leave hands its unfinished samples over: no token that it made is made again."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from bus.table import PARTIALS, ROLLOUTS
from schemas import Partial, Rollout
from tests.e2e.harness import Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e

STEPS = 30


def test_the_tokens_of_a_worker_that_is_terminated_are_in_the_finished_samples(
    launch: Callable[..., Launched],
) -> None:
    """Preemption is normal life on many nodes, and long answers are what is expensive."""
    run = launch(f"steps={STEPS}", "rollout.workers=2", "rollout.slots=8", "rollout.partial_every=0")
    for step in range(2, STEPS):  # it is given time to begin, and now and then has nothing in hand all the same
        run.until_step(step)
        run.until_replaced("rollout-0", run.kill("rollout-0", signal.SIGTERM))
        if read_all(run.folder, PARTIALS) != [[]]:
            break
    assert run.ends() == 0, run.output
    audit = assert_sound(run.folder, STEPS)

    kept, finished = read_all(run.folder, PARTIALS, ROLLOUTS)
    by_id = {rollout.sample_id: rollout for rollout in finished if isinstance(rollout, Rollout)}
    # Nothing is saved but at a hand-over. Those that never finished were dropped, which the audit has seen to.
    prefixes = [partial for partial in kept if isinstance(partial, Partial) and partial.sample_id in by_id]
    assert {partial.worker for partial in prefixes} == {"rollout-0"}, "it had nothing in hand, which shows nothing"
    for partial in prefixes:
        rollout = by_id[partial.sample_id]
        length = len(partial.tokens)
        assert rollout.resumed >= 1
        assert rollout.tokens[:length].tolist() == partial.tokens.tolist()
        assert rollout.logprobs[:length].tobytes() == partial.logprobs.tobytes()
    assert audit.report.totals["partials continued"] == len(prefixes)
    assert audit.report.totals["tokens handed over"] == sum(len(partial.tokens) for partial in prefixes)
