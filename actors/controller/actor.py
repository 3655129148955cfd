"""The controller on the bus: one active, any number on standby.

It reads scored, dropped and weights from where the last batch says that they matter, decides, and publishes. A lease
makes one controller the active one; that is for calm only. Safety comes from fencing: prompts and batches are stored
directly after the last one that we know of, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from actors import clock
from actors.controller.config import ControllerConfig
from actors.controller.core import ControllerCore, Decision
from actors.controller.stages import Stages
from actors.gauges import Gauges
from bus.port import Bus, Entry, Fenced
from bus.reading import read_to_end
from bus.table import (
    BATCHES,
    CONTROL,
    DROPPED,
    LEASE_S,
    PROMPTS,
    PUBLISH_DEADLINE_S,
    REWARD_WORKERS,
    ROLLOUT_WORKERS,
    SCORED,
    WEIGHTS,
    Stream,
)
from schemas import Batch, Control, Dropped, MalformedMessage, Prompt, Scored, UserError, WeightVersion

log = structlog.get_logger()

EVENTS_MAX = 10_000  # entries read and not yet decided upon
WAKE_S = 0.5
LOOK_EVERY_S = 0.25  # at the queue of prompts; for the pace, so it need not be exact


def sample_seed(run_seed: int, group_id: int, index: int) -> int:
    """The 62-bit sampling seed of a sample, equal on every machine and after every restart."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class Controller:
    """Runs a `ControllerCore` against the log until the run is finished.

    `row(k)` is the data row of the k-th admitted group: a map with `prompt`, the rest is the task for the reward.
    """

    def __init__(
        self,
        bus: Bus,
        config: ControllerConfig,
        steps: int,
        seed: int,
        row: Callable[[int], Mapping[str, Any]],
        name: str = "controller",
    ) -> None:
        self.bus = bus
        self.config = config
        self.steps = steps
        self.seed = seed
        self.row = row
        self.name = name
        self.core: ControllerCore | None = None
        self.gauges = Gauges(bus, name, "controller", self._read_gauges)
        self._prompts_seq = 0
        self._batches_seq = 0
        self._stages = Stages()

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by, become active, lead the run to its end or until `stop`."""
        async with self.gauges.beating():
            while not stop.is_set():
                holder = f"{self.name}/{clock.process()}"
                revision = await self.bus.acquire("controller", holder, LEASE_S)
                if revision is None:
                    with self.gauges.waiting("the active controller to fail (standby)"):
                        if await self._ended():
                            return
                        await _sleep_or(stop, LEASE_S / 3)
                    continue
                if await self._lead(holder, revision, stop):
                    return

    async def _lead(self, holder: str, revision: int, stop: asyncio.Event) -> bool:
        """Be the active controller; True if the run is over, False if another one took over."""
        lost = asyncio.Event()
        lease = {"revision": revision}
        keeper = asyncio.create_task(self._keep_lease(holder, lease, lost), name="lease of the controller")
        try:
            return await self._active(stop, lost)
        except Fenced as error:
            log.warning("controller_was_fenced", reason=str(error))
            return False
        finally:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
            if not lost.is_set():
                await self.bus.release("controller", lease["revision"])
            self.core = None

    async def _keep_lease(self, holder: str, lease: dict[str, int], lost: asyncio.Event) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            revision = await self.bus.renew("controller", holder, lease["revision"], LEASE_S)
            if revision is None:
                log.warning("controller_lost_its_lease", holder=holder)
                lost.set()
                return
            lease["revision"] = revision

    async def _active(self, stop: asyncio.Event, lost: asyncio.Event) -> bool:
        core, starts = await self._fold()
        self.core = core
        events: asyncio.Queue[Entry] = asyncio.Queue(EVENTS_MAX)
        readers = [
            asyncio.create_task(self._pump(stream, start, events), name=f"controller reads {stream.name}")
            for stream, start in starts.items()
        ]
        readers.append(asyncio.create_task(self._look_at_queue(core), name="controller looks at the queue"))
        try:
            while not stop.is_set():
                await self._publish_decisions(core)
                if core.finished:
                    return await self._finish()
                core.failures.check()
                if lost.is_set():
                    return False
                with self.gauges.waiting(self._stages.limit(core)), contextlib.suppress(TimeoutError):
                    self._take(core, await asyncio.wait_for(events.get(), WAKE_S))
                while not events.empty():
                    self._take(core, events.get_nowait())
                for reader in readers:
                    if reader.done():
                        reader.result()
            return True
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _fold(self) -> tuple[ControllerCore, dict[Stream, int]]:
        """The state of the run as the log tells it, and from where on each stream is still to be read."""
        newest = await self.bus.last(BATCHES)
        batch = newest.message() if newest else None
        assert batch is None or isinstance(batch, Batch)
        core = ControllerCore(self.config, self.steps, batch)
        self._batches_seq = newest.seq if newest else 0
        marks = {name: int(seq) for name, seq in batch.marks.items()} if batch else {}
        self._prompts_seq = (await self.bus.info(PROMPTS)).last_seq
        start = marks.get("prompts", 1)
        async for entry in read_to_end(self.bus, PROMPTS, start, self._prompts_seq + 1, PUBLISH_DEADLINE_S):
            sample, versions = entry.sample, entry.versions
            if sample is None or versions is None:  # written by us alone, so this cannot be
                raise UserError(f"Entry {entry.seq} of the prompts stream has no valid headers.")
            core.saw_prompt(entry.seq, *sample, versions[0])
        # All drops, before anything is decided. Verdicts alone would say the same only as long as the recipe is the
        # same: resumed with a larger staleness bound, a controller trained what had been dropped for its age.
        dropped = marks.get("dropped", 1)
        async for entry in read_to_end(self.bus, DROPPED, dropped, silence_s=PUBLISH_DEADLINE_S):
            self._take(core, entry)
            dropped = entry.seq + 1
        core.failures.begin()  # what the log held before was mended, or the run would not be resumed
        weights = await self.bus.last(WEIGHTS)
        if weights is not None:
            self._take(core, weights)
        log.info(
            "controller_became_active",
            name=self.name,
            next_step=core.next_step,
            next_group=core.next_group,
            live_groups=len(core.live),
            newest_version=core.newest_version,
        )
        return core, {
            SCORED: marks.get("scored", 1),
            DROPPED: dropped,
            WEIGHTS: weights.seq + 1 if weights else 1,
            CONTROL: 1,
        }

    async def _look_at_queue(self, core: ControllerCore) -> None:
        while True:
            prompts, rollouts = await asyncio.gather(
                self.bus.backlog(ROLLOUT_WORKERS), self.bus.backlog(REWARD_WORKERS)
            )
            core.unbegun_prompts = prompts.pending
            self._stages = Stages(prompts.pending, prompts.ack_pending, rollouts.pending + rollouts.ack_pending)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _pump(self, stream: Stream, start: int, events: asyncio.Queue[Entry]) -> None:
        async for entry in self.bus.read(stream, start):
            await events.put(entry)

    def _take(self, core: ControllerCore, entry: Entry) -> None:
        try:
            message = entry.message()
        except MalformedMessage as error:
            log.error(
                "controller_skipped_malformed_entry", stream=entry.stream.name, seq=entry.seq, reason=error.reason
            )
            if entry.stream is SCORED and entry.sample is not None:
                core.saw_malformed(*entry.sample, detail=error.reason)
            return
        match message:
            case Scored():
                core.saw_scored(entry.seq, message, entry.time_s)
            case Dropped():
                core.saw_dropped(entry.seq, message)
            case WeightVersion():
                core.saw_weights(message.version)
            case Control(action="pause"):
                core.paused = True
            case Control(action="resume"):
                core.paused = False
            case _:
                pass

    async def _publish_decisions(self, core: ControllerCore) -> None:
        if core.overtaken:
            raise Fenced("another controller admitted a group that this one does not know")
        while decision := core.decide():
            await self._publish(core, decision)

    async def _publish(self, core: ControllerCore, decision: Decision) -> None:
        if decision.batch is not None:
            self._batches_seq = await self.bus.publish_fenced([decision.batch], self._batches_seq)
        if decision.drops:
            await asyncio.gather(*(self.bus.publish(dropped) for dropped in decision.drops))
        prompts = [
            prompt
            for admission in decision.admissions
            for prompt in self._prompts(admission.group_id, admission.indices, admission.min_version)
        ]
        if prompts:
            self._prompts_seq = await self.bus.publish_fenced(prompts, self._prompts_seq)
            core.saw_own_prompts(self._prompts_seq)

    def _prompts(self, group_id: int, indices: tuple[int, ...], min_version: int) -> list[Prompt]:
        row = dict(self.row(group_id))
        prompt = row.pop("prompt")
        try:
            return [
                Prompt(
                    group_id=group_id,
                    index=index,
                    group_size=self.config.group_size,
                    prompt=prompt,
                    task=row,
                    seed=sample_seed(self.seed, group_id, index),
                    min_version=min_version,
                )
                for index in indices
            ]
        except MalformedMessage as error:
            raise UserError(
                f"Row {group_id} of the training data cannot be sent: {error.reason}.",
                "Rows hold text, finite numbers, and lists and maps of them.",
            ) from None

    async def _finish(self) -> bool:
        """Tell everybody that the run is over, unless somebody else has admitted more."""
        if (await self.bus.info(PROMPTS)).last_seq != self._prompts_seq:
            raise Fenced("prompts were published that this controller does not know")
        await self.bus.publish(Control(action="stop", nonce=f"end-{self.steps}", detail="all steps are done"))
        log.info("run_finished", steps=self.steps)
        return True

    async def _ended(self) -> bool:
        newest = await self.bus.last(CONTROL)
        if newest is None:
            return False
        message = newest.message()
        return isinstance(message, Control) and message.action == "stop" and message.nonce == f"end-{self.steps}"

    def _read_gauges(self) -> dict[str, Any]:
        core = self.core
        if core is None:
            return {"active": False}
        return {
            "active": True,
            "live_groups": len(core.live),
            "in_flight_groups": core.in_flight,
            "ready_groups": core.ready_groups,
            "group_limit": core.pace.limit,
            "group_bound": core.bound,
            "unbegun_prompts": core.unbegun_prompts,
            "generating_samples": self._stages.generating,
            "scoring_samples": self._stages.scoring,
            "trained_age": round(core.pace.age or 0.0, 3),
            "version": core.newest_version,
            "next_step": core.next_step,
            "admitted_groups": core.next_group,
            "dropped_groups": core.dropped_groups,
        }


async def _sleep_or(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
