"""One short real run for all tests that replay, trace and compare."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.ops.recorded_run import record_run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a run, in whose folder lie `initial`, `checkpoints` and `weights`, too."""
    return asyncio.run(record_run(tmp_path_factory.mktemp("recorded")))
