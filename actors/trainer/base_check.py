"""A checkpoint of adapters does not hold what they stand on: that must be version 0 as it was published."""

from collections.abc import Mapping
from typing import Any

from bus.port import Bus
from bus.table import WEIGHTS
from bus.weights.files import digest_of
from bus.weights.tensors import to_bytes
from schemas import UserError, WeightVersion


async def check_base(bus: Bus, weights: Mapping[str, Any]) -> None:
    """Raise `UserError` if `weights`, whole, are not those of version 0 in the log; nothing is checked without one."""
    if await bus.last(WEIGHTS) is None:
        return
    (entry,) = await bus.get(WEIGHTS, [1])  # version v stands at sequence v + 1
    published = entry.message()
    assert isinstance(published, WeightVersion)
    found = digest_of(to_bytes(weights))
    if found != published.result_digest:
        raise UserError(
            f"The base of the LoRA adapters has changed: the model in the run's folder has digest {found[:15]}…, and "
            f"version 0 was published with {published.result_digest[:15]}….",
            "Restore the folder `initial` of the run, and keep rollout.dtype as it was; or begin a new run.",
        )
