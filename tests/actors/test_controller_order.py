"""In which order the controller's decisions are stored is what a crash between two of them turns on."""

from __future__ import annotations

from actors.controller.config import ControllerConfig
from actors.controller.core import ControllerCore, Decision
from schemas import Batch, Dropped, Scored


def scored(group_id: int, index: int, reward: float) -> Scored:
    return Scored(
        group_id=group_id,
        index=index,
        group_size=2,
        rollout_seq=1 + 2 * group_id + index,
        prompt_length=1,
        segments=[(0, 4)],
        finish="stop",
        verdict="scored",
        reward=reward,
    )


def decisions(core: ControllerCore) -> list[Decision]:
    out = []
    while decision := core.decide():
        out.append(decision)
    return out


def test_what_a_batch_forgets_has_its_terminal_record_before_the_batch() -> None:
    """A successor folds from the newest batch. A drop that was to follow it, and did not, would be lost for ever."""
    core = ControllerCore(
        ControllerConfig(max_staleness=1, batch_groups=1, group_size=2, filter="zero_variance", pace=False), steps=4
    )
    core.saw_weights(0)
    decisions(core)
    answers = [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 1.0)]  # group 0 teaches nothing, group 1 fills a batch
    for seq, (group_id, index, reward) in enumerate(answers, start=1):
        core.saw_scored(seq, scored(group_id, index, reward))
    stored: set[str] = set()
    for decision in decisions(core):
        stored |= {dropped.sample_id for dropped in decision.drops}
        if (batch := decision.batch) is not None:
            assert isinstance(batch, Batch)
            assert not decision.drops, "what is stored first would be a matter of luck"
            assert 0 not in batch.live_groups.tolist()
            assert stored == {"0-0", "0-1"}
            break
    else:
        raise AssertionError("no batch was formed")


def test_what_another_controllers_batch_left_out_for_its_age_does_not_end_the_rest_of_the_group() -> None:
    """Two may lead for a moment. The one that has not seen the batch knew a drop for age only as the end of a group.

    Found by simulation: it dropped the samples that the batch trains.
    """
    core = ControllerCore(
        ControllerConfig(max_staleness=0, batch_groups=1, group_size=4, filter="zero_variance", pace=False), steps=4
    )
    core.saw_weights(0)
    decisions(core)
    core.saw_dropped(1, Dropped(group_id=0, index=0, reason="stale", tokens=4))
    for seq, index in enumerate((1, 2, 3), start=1):
        core.saw_scored(seq, scored(0, index, reward=1.0))  # equal, but those of the whole group were not
    (decision,) = [decision for decision in decisions(core) if decision.batch is not None]
    assert decision.batch is not None  # it will be fenced
    assert decision.batch.sample_ids == ["0-1", "0-2", "0-3"]


def test_a_worker_that_gives_one_sample_up_ends_no_other_of_its_group() -> None:
    """Found by simulation: an episode that was filtered took its whole group along."""
    core = ControllerCore(ControllerConfig(max_staleness=0, batch_groups=1, group_size=4, pace=False), steps=4)
    core.saw_weights(0)
    decisions(core)
    core.saw_dropped(1, Dropped(group_id=0, index=0, reason="filtered", worker="episode-0"))
    for seq, index in enumerate((1, 2, 3), start=1):
        core.saw_scored(seq, scored(0, index, reward=index))
    (decision,) = [decision for decision in decisions(core) if decision.batch is not None]
    assert decision.batch is not None
    assert decision.batch.sample_ids == ["0-1", "0-2", "0-3"]
