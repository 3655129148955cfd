"""The simulation must find what is wrong: each planted bug still applies, and some are searched for each time.

`make sim` searches for all of them.
"""

import pytest

from tests.sim.planted import BUGS, Bug, planted, search


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_applies_to_the_code_as_it_is(bug: Bug) -> None:
    """Else the table would tell of code that is no more."""
    with planted(bug):
        pass


def test_what_was_planted_is_gone_afterwards() -> None:
    """Else all later tests would run with the bug."""
    from bus.shell import _Shell

    before = _Shell.__dict__["_settle"]
    with planted(BUGS[0]):
        assert _Shell.__dict__["_settle"] is not before
    assert _Shell.__dict__["_settle"] is before


QUICK = (
    "a message is acknowledged before its outputs are stored",
    "batches are not fenced",
    "the gate admits one step too many",
    "all tokens are tagged with the version at the end",
    "a trainer that starts again skips the batches since its checkpoint",
    "a prompt is acknowledged before its episode's rollout is stored",
    "an episode that runs again counts its turns otherwise",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str) -> None:
    """One of each kind of promise."""
    (bug,) = (bug for bug in BUGS if bug.name == name)
    found = search(bug)
    assert found.seed is not None
