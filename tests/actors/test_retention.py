"""What is kept decides what a run can go back to, and what it costs; held to a plain twin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.retention import Judged, Retention, best_of

VERSIONS = st.sets(st.integers(0, 40), max_size=12)
SCORES = st.dictionaries(st.integers(0, 40), st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]), max_size=12)


@given(VERSIONS, SCORES, VERSIONS, st.integers(1, 4), st.sampled_from([0, 3, 10]))
def test_a_version_stays_for_one_of_four_reasons(
    versions: set[int], scores: dict[int, float], at_work: set[int], last: int, every: int
) -> None:
    judged = Judged(scores, frozenset(at_work))
    kept = Retention(last, every).kept(versions, judged)
    for version in versions:
        among_the_newest = sum(other > version for other in versions) < last
        a_multiple = every > 0 and version > 0 and version % every == 0
        rivals = [(scores[other], -other) for other in versions & scores.keys()]
        the_best = version in scores and (scores[version], -version) == max(rivals)
        assert (version in kept) == (among_the_newest or a_multiple or the_best or version in at_work)
    assert kept <= versions


@pytest.mark.parametrize("last", [-1, 0, 1])
def test_the_newest_always_stays(last: int) -> None:
    assert Retention(last).kept({3, 9, 6}) == {9}


def test_of_equal_scores_the_first_is_the_best_and_without_scores_none_is() -> None:
    """A mark that moves with every evaluation would say nothing once all problems are solved."""
    assert best_of([9, 6, 3], Judged({3: 0.5, 6: 1.0, 9: 1.0})) == 6
    assert best_of([9, 6, 3], Judged({12: 1.0})) is None
