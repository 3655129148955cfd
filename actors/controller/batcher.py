"""Which groups go into step i, and whether step i may be formed yet. Pure.

Order is earliest deadline first, ties by admission, never by completion: that would favour short answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from actors.controller.groups import Group


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What step i would do: train `groups` (without the samples in `stale`), and end the groups in `dead`.

    `dead` groups have too few fresh answers left, now and for ever, since versions only rise. `groups` is empty if the
    step cannot be formed yet.
    """

    groups: tuple[Group, ...]
    stale: dict[int, list[int]]
    dead: tuple[Group, ...]


def select(
    live: Iterable[Group],
    step: int,
    batch_groups: int,
    max_staleness: int,
    on_stale: Literal["mask", "drop", "wait"],
) -> Selection:
    """The groups of step `step` out of the live ones.

    `wait` promises that no token is ever masked or dropped for its age: a batch is formed only if afterwards, for every
    deadline d, at most `(d - step) * batch_groups` groups are left that must be trained by d (Hall's condition, which
    eq. 3 of arXiv 2505.24298 makes true at admission and this rule keeps true). Where no order could keep it, since a
    run was resumed with a smaller η, nothing is waited for in vain: then these groups are the exception.
    """
    everyone = sorted(live, key=lambda group: (group.deadline(max_staleness), group.group_id))
    chosen: list[Group] = []
    stale: dict[int, list[int]] = {}
    dead: list[Group] = []
    for group in everyone:
        if not group.complete:
            continue
        too_old = group.stale_at(step, max_staleness, whole_sample=on_stale == "drop")
        if len(group.answers) - len(too_old) < group.fewest:
            dead.append(group)
        elif len(chosen) < batch_groups:
            chosen.append(group)
            if too_old:
                stale[group.group_id] = too_old
    if len(chosen) < batch_groups or (
        on_stale == "wait" and not _others_can_wait(everyone, chosen, dead, step, batch_groups, max_staleness)
    ):
        return Selection((), {}, tuple(dead))
    return Selection(tuple(sorted(chosen, key=lambda group: group.group_id)), stale, tuple(dead))


def _others_can_wait(
    everyone: Sequence[Group],
    chosen: Sequence[Group],
    dead: Sequence[Group],
    step: int,
    batch_groups: int,
    max_staleness: int,
) -> bool:
    gone = {group.group_id for group in (*chosen, *dead)}
    last = max(group.deadline(max_staleness) for group in chosen)
    for left, group in enumerate((group for group in everyone if group.group_id not in gone), start=1):
        deadline = group.deadline(max_staleness)
        if deadline >= last:  # all chosen ones are due by then too: no other choice would leave fewer
            return True
        if left > (deadline - step) * batch_groups:
            return False
    return True
