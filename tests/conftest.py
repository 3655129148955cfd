"""For all tests: what a busy machine makes slow is not wrong."""

import pytest
from hypothesis import HealthCheck, settings

WHOLE_RUN_S = 600

settings.register_profile("by result", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("by result")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs have more time than other tests: each notices by itself that a process hangs."""
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_RUN_S))
