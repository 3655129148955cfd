"""How many workers a run has is what people pay for: asked for by a message, obeyed once, kept over a resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus
from ops import launch
from ops.host import ProcessSpec
from ops.launch import Where
from ops.recipe import Recipe, load_recipe
from ops.scale import parse, scale
from ops.workers import Crew, Wanted, read_wanted, specs
from schemas import Control, MalformedMessage, UserError
from tests.e2e.harness import RECIPE

WHERE = Where(Path("run"), "run", "nats://localhost")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, overrides)


def start(*overrides: str, nonce: str = "1") -> Control:
    return Control(action="start", nonce=nonce, recipe=recipe(*overrides).to_log())


def scaled(nonce: str, **workers: int) -> Control:
    return Control(action="scale", nonce=nonce, workers={role: float(count) for role, count in workers.items()})


class FakeSupervisor:
    """Processes that start at once and leave when `let_go` is called."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.leaving: set[str] = set()
        self.draining = False
        self.started: list[str] = []

    async def start(self, spec: ProcessSpec) -> None:
        assert spec.name not in self.names, "two processes of one name"
        self.names.add(spec.name)
        self.started.append(spec.name)

    def leave(self, name: str) -> None:
        self.leaving.add(name)

    def let_go(self) -> None:
        self.names -= self.leaving
        self.leaving.clear()

    @property
    def rollouts(self) -> list[str]:
        return sorted(name for name in self.names - self.leaving if name.startswith("rollout"))


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


async def until(what: str, holds: object) -> None:
    async with asyncio.timeout(30):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def wanted_of(bus: Bus, *messages: Control) -> Wanted:
    for message in messages:
        await bus.publish(message)
    return await read_wanted(bus)


async def test_the_newest_word_holds(bus: Bus) -> None:
    """A recipe, then two commands: each role for itself."""
    wanted = await wanted_of(
        bus, start("rollout.workers=2", "reward.workers=3"), scaled("a", rollout=5), scaled("b", reward=4)
    )
    assert wanted.workers == {"rollout": 5, "reward": 4}
    assert (await wanted_of(bus, scaled("c", rollout=1))).workers == {"rollout": 1, "reward": 4}


async def test_a_run_that_is_resumed_keeps_the_number_unless_its_recipe_says_a_new_one(bus: Bus) -> None:
    """The launcher holds no state: neither a kill of it nor a new set of steps takes workers away."""
    wanted = await wanted_of(bus, start("rollout.workers=2"), scaled("a", rollout=5))
    wanted = await wanted_of(bus, start("rollout.workers=2", "steps=99", nonce="2"))
    assert wanted.workers["rollout"] == 5
    assert (await wanted_of(bus, start("rollout.workers=3", nonce="3"))).workers["rollout"] == 3


async def test_the_crew_follows_the_log_and_does_nothing_twice(bus: Bus) -> None:
    """2 -> 6 -> 1 -> 3, the last while those who left are still handing over: their names are not given out twice."""
    await bus.publish(start("rollout.workers=2"))
    supervisor = FakeSupervisor()
    crew = Crew(supervisor, recipe("rollout.workers=2"), WHERE)  # type: ignore[arg-type]
    await crew.start(bus)
    assert supervisor.rollouts == ["rollout-0", "rollout-1"]
    following = asyncio.create_task(crew.follow(bus))
    try:
        await bus.publish(scaled("a", rollout=6))
        await until("six", lambda: len(supervisor.rollouts) == 6)
        await bus.publish(scaled("b", rollout=6))
        await bus.publish(scaled("c", rollout=1))
        await until("one", lambda: supervisor.rollouts == ["rollout-0"])
        await bus.publish(scaled("d", rollout=3))
        await until("a look", lambda: crew.gauges()["control_seq"] == 5)
        assert supervisor.rollouts == ["rollout-0"]
        assert crew.gauges() | {"control_seq": 0} == {
            "control_seq": 0, "rollout_wanted": 3, "rollout_here": 1, "rollout_leaving": 5,
            "reward_wanted": 1, "reward_here": 1, "reward_leaving": 0,
        }  # fmt: skip
        supervisor.let_go()
        await until("three", lambda: supervisor.rollouts == ["rollout-0", "rollout-1", "rollout-2"])
        assert not following.done()
        assert supervisor.started.count("rollout-0") == 1
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_launcher_that_comes_back_starts_what_was_asked_for_while_it_was_away(bus: Bus) -> None:
    await bus.publish(start("rollout.workers=2"))
    await bus.publish(scaled("a", rollout=4))
    await bus.publish(start("rollout.workers=2", nonce="2"))
    supervisor = FakeSupervisor()
    await Crew(supervisor, recipe("rollout.workers=2"), WHERE).start(bus)  # type: ignore[arg-type]
    assert len(supervisor.rollouts) == 4


def test_reward_workers_beyond_those_of_the_controllers_process_have_their_own() -> None:
    names = [spec.name for spec in specs(recipe("processes=shared", "reward.workers=2"), WHERE, {"reward": 4})]
    assert names == ["controller+reward-0+reward-1", "trainer", "reward-2", "reward-3", "rollout-0"]
    apart = [spec.name for spec in specs(recipe("processes=separate"), WHERE, {"reward": 2, "rollout": 0})]
    assert apart == ["controller", "trainer", "reward-0", "reward-1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "how many"),
        (["run", "other", "rollout=1"], "'other' is no number"),
        (["rollout=x"], "no number"),
        (["rollout=-1"], "no number"),
        (["rollout=2000"], "no number"),
        (["trainer=2"], "trainer cannot be scaled"),
        (["controller=2"], "controller cannot be scaled"),
        (["rolout=2"], "rolout is no role"),
        (["rollout=2", "rollout=3"], "given twice"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_a_remedy(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse(arguments)
    assert caught.value.remedy


def test_a_command_names_a_run_or_none() -> None:
    assert parse(["rollout=3"]) == (None, {"rollout": 3})
    assert parse(["my-run", "reward=2", "rollout=0"]) == ("my-run", {"reward": 2, "rollout": 0})


async def test_scale_tells_what_the_launcher_did(bus: Bus) -> None:
    await bus.publish(start("rollout.workers=2"))
    supervisor = FakeSupervisor()
    crew = Crew(supervisor, recipe("rollout.workers=2"), WHERE)  # type: ignore[arg-type]
    await crew.start(bus)

    async def beat() -> None:
        while True:
            await bus.beat({"actor": "launcher", "process": "node-a:17", **crew.gauges()})
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(crew.follow(bus)), asyncio.create_task(beat())]
    try:
        assert await scale(bus, {"rollout": 4}) == ["rollout: 2 -> 4 on node-a"]
        assert await scale(bus, {"rollout": 4}) == ["rollout: 4 as before on node-a"]
        assert await scale(bus, {"rollout": 1}) == ["rollout: 4 -> 1 on node-a; 3 still hand their work over"]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_run_that_has_ended_or_has_no_launcher_says_so(bus: Bus) -> None:
    with pytest.raises(UserError, match="never started"):
        await scale(bus, {"rollout": 2})
    await bus.publish(start("steps=5", "processes=shared"))
    with pytest.raises(UserError, match="fewer than the 1 that share"):
        await scale(bus, {"reward": 0})
    with pytest.raises(UserError, match="did not answer") as caught:
        await scale(bus, {"rollout": 2}, answer_s=0.05)
    assert "resume" in str(caught.value.remedy)
    assert (await read_wanted(bus)).workers["rollout"] == 2
    await bus.publish(Control(action="stop", nonce="end-5"))
    with pytest.raises(UserError, match="has ended"):
        await scale(bus, {"rollout": 2})


def test_a_message_asks_for_counts_or_is_no_request_to_scale() -> None:
    for action, workers in (("scale", {}), ("pause", {"rollout": 1.0}), ("scale", {"rollout": 1.5})):
        with pytest.raises(MalformedMessage):
            Control(action=action, nonce="a", workers=workers)  # type: ignore[arg-type]


async def test_who_adds_workers_is_told_at_once_what_is_being_started_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one waits for the fork server's imports: on a busy machine that was half a minute of silence."""
    (tmp_path / "initial").mkdir()
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()

    class Importing(launch.Supervisor):
        async def start(self, spec: ProcessSpec) -> None:
            raise UserError("It is imported still.", "Wait.")

    monkeypatch.setattr(launch, "Supervisor", Importing)
    with pytest.raises(UserError, match="imported still"):
        await launch._join("rollout", Where(tmp_path, "run", "nats://localhost"), bus, recipe().to_yaml(), 2, None)
    assert capsys.readouterr().out == f"starting 2 rollout actor(s) of run, with logs in {tmp_path / 'logs'}\n"
    await bus.close()
