"""For all tests: what a busy machine makes slow is not wrong."""

import pytest
from hypothesis import HealthCheck, settings

WHOLE_RUN_S = 600

# The same examples each time, so that what fails was broken by the change; `make properties` looks for new ones.
_SLOW_IS_NOT_WRONG = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _SLOW_IS_NOT_WRONG, derandomize=True)
settings.register_profile("search", _SLOW_IS_NOT_WRONG)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs have more time than other tests: each notices by itself that a process hangs."""
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_RUN_S))
