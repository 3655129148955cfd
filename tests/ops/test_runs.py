"""A trace colours tokens by these runs: one too long paints a tool's words as the model's."""

import itertools

from hypothesis import given

from ops.runs import Run, runs_of
from tests.schemas.test_trajectory import trajectories


@given(trajectories())
def test_runs_are_the_tokens_of_one_kind_side_by_side(trajectory):
    made, versions, of_sequence, segments, spans, sequences = trajectory
    kinds = [(v, not own, k) for v, own, k in zip(versions, made, of_sequence, strict=True)]
    expected, at = [], 0
    for (version, told, sequence), same in itertools.groupby(kinds):
        count = len(list(same))
        expected.append(Run(version, at, count, told, sequence))
        at += count
    assert runs_of(segments, spans, sequences) == expected
