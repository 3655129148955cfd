"""Whatever a user's reward does, each sample gets a verdict that names it, and the others do not notice."""

import asyncio
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.reward.actor import FAILED_GROUPS_MAX, RewardWorker
from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from bus.jetstream import JetStreamBus
from bus.table import SCORED
from ops.nats_server import NatsServer
from schemas import Rollout, Scored, UserError
from tests.actors.reward_pools import request, running
from tests.bus.samples import connected, rollout

FAULTS = """
    import ctypes, os, sys, threading, time
    import numpy as np

    class Liar(dict):
        def __len__(self): raise RuntimeError("no length")

    class Sly(float):
        def __float__(self): raise RuntimeError("no float")

    def endless():
        while True: pass

    def raises(error): raise error

    FAULTS = {
        "hangs": lambda: time.sleep(600),
        "spins": endless,
        "raises": lambda: raises(ValueError("no such unit")),
        "raises 10 MB": lambda: raises(ValueError("x" * 10_000_000)),
        "recurses": lambda: (lambda f: f(f))(lambda f: f(f)),
        "exits": lambda: sys.exit(0),
        "leaves": lambda: os._exit(0),
        "segfaults": lambda: ctypes.string_at(0),
        "interrupts": lambda: raises(KeyboardInterrupt()),
        "nan": lambda: float("nan"),
        "nan of numpy": lambda: np.float32("nan"),
        "inf": lambda: float("inf"),
        "too large": lambda: 10 ** 400,
        "none": lambda: None,
        "text": lambda: "1.0",
        "10 MB of text": lambda: "x" * 10_000_000,
        "complex": lambda: 1j,
        "array": lambda: np.ones(3),
        "huge array": lambda: np.ones(3_000_000),
        "many parts": lambda: {"reward": 1, **{str(i): i for i in range(100_000)}},
        "part of text": lambda: {"reward": 1, "why": "x" * 10_000_000},
        "no reward": lambda: {"x" * 10_000_000: 1},
        "lies of its length": lambda: Liar(reward=1),
        "lies of its value": lambda: Sly(1),
        "many tokens": lambda: {"reward": 1, "token_rewards": [0.0] * 3_000_000},
        "numpy": lambda: np.float64(0.5),
        "negative zero": lambda: -0.0,
        "long name": lambda: {"reward": 1, "n" * 10_000_000: 1},
        "leaves a thread": lambda: threading.Thread(target=endless, daemon=True).start() or 1,
        "slow": lambda: time.sleep(0.3) or 1,
    }

    def reward(response, task):
        return FAULTS[task["fault"]]() if "fault" in task else 1.0
"""

TIMEOUT_S = 2.0  # what ends by itself takes at most 0.1 s of it
FOUND = {
    "hangs": ("timeout", "gave no answer within 2 s"),
    "spins": ("timeout", "gave no answer within 2 s"),
    "raises": ("error", "ValueError: no such unit (rewards.py, line "),
    "raises 10 MB": ("error", "ValueError: xxx"),
    "recurses": ("error", "RecursionError: "),
    "exits": ("error", "SystemExit: 0 (rewards.py, line "),
    "leaves": ("error", "the reward process failed: it exited with status 0"),
    "segfaults": ("error", "the reward process failed: it was killed by SIGSEGV"),
    "interrupts": ("error", "KeyboardInterrupt: "),
    "nan": ("invalid", "the reward is nan, not a finite number"),
    "nan of numpy": ("invalid", "the reward is nan, not a finite number"),
    "inf": ("invalid", "the reward is inf, not a finite number"),
    "too large": ("invalid", "the reward is inf, not a finite number"),
    "none": ("invalid", "the reward is NoneType, not a number"),
    "text": ("invalid", "the reward is str, not a number"),
    "10 MB of text": ("invalid", "the reward is str, not a number"),
    "complex": ("invalid", "the reward is complex, not a number"),
    "array": ("invalid", "the reward is ndarray, not a number"),
    "huge array": ("invalid", "the reward is ndarray, not a number"),
    "many parts": ("invalid", "the returned dict has 100001 entries, more than 64"),
    "part of text": ("invalid", "the part 'why' is str, not a number"),
    "no reward": ("invalid", "the returned dict has no 'reward', only "),
    "lies of its length": ("invalid", "RuntimeError: no length"),
    "lies of its value": ("invalid", "RuntimeError: no float"),
    "many tokens": ("invalid", "'token_rewards' has 3000000 items, more than"),
    "numpy": ("scored", ""),
    "negative zero": ("scored", ""),
    "long name": ("scored", ""),
    "leaves a thread": ("scored", ""),
    "slow": ("scored", ""),
}
KILLED = ("hangs", "spins", "leaves", "segfaults")


@pytest.fixture
async def server_url(tmp_path: Path) -> AsyncIterator[str]:
    server = NatsServer()
    yield await server.start(tmp_path / "nats")
    await server.stop()


def faulty(group: int, fault: str | None) -> Rollout:
    fields = {name: getattr(rollout(group), name) for name in rollout(group).packed()}
    return Rollout(**fields | {"task": {"fault": fault} if fault else {}})


async def test_each_fault_has_its_verdict_and_a_sound_process_comes_after_it(tmp_path: Path) -> None:
    async with running(tmp_path, FAULTS, timeout_s=TIMEOUT_S, retries=0, children=1) as pool:
        for fault, (status, detail) in FOUND.items():
            verdict = await pool.score(request(fault=fault))
            assert (verdict.status, verdict.reward is None) == (status, status != "scored"), (fault, verdict)
            assert detail in verdict.detail, (fault, verdict.detail)
            assert len(verdict.detail) <= 500, fault
            assert all(len(name) <= 80 for name in verdict.parts), fault
            assert (await pool.score(request())).status == "scored", fault


async def scored_by_a_worker(
    url: str, base: Path, rollouts: Sequence[Rollout], wait_s: float = 60.0, **config: Any
) -> tuple[dict[str, Scored], list[Any]]:
    """The verdicts by sample, and the log, of one real worker on a real server. Raises what it dies of."""
    (base / "rewards.py").write_text(textwrap.dedent(FAULTS))
    bus: JetStreamBus = await connected(url, ack_wait_s=6.0)
    try:
        for message in rollouts:
            await bus.publish(message)
        wanted = RewardConfig(function="rewards.py:reward", **config)
        worker = RewardWorker(bus, wanted, RewardPool(wanted, base), "reward-0")
        stop = asyncio.Event()
        with capture_logs() as logged:
            working = asyncio.create_task(worker.run(stop))
            async with asyncio.timeout(wait_s):
                while (await bus.info(SCORED)).messages < len(rollouts) and not working.done():
                    await asyncio.sleep(0.05)
            stop.set()
            async with asyncio.timeout(30):
                await working
        count = (await bus.info(SCORED)).messages
        verdicts = [entry.message() for entry in await bus.get(SCORED, range(1, count + 1))]
        return {verdict.sample_id: verdict for verdict in verdicts if isinstance(verdict, Scored)}, logged
    finally:
        await bus.close()


async def test_a_worker_names_each_fault_retries_it_and_goes_on(server_url: str, tmp_path: Path) -> None:
    """All faults among sound samples, on the real log: what is a failure of the function is tried again, a lie not."""
    faults: list[str | None] = []
    for fault in FOUND:
        faults.extend([None, fault, None])
    rollouts = [faulty(group, fault) for group, fault in enumerate(faults)]
    verdicts, logged = await scored_by_a_worker(
        server_url, tmp_path, rollouts, timeout_s=TIMEOUT_S, retries=1, children=4
    )
    told = {line["sample"]: line for line in logged if line["event"] == "sample_not_scored"}
    for group, fault in enumerate(faults):
        verdict = verdicts[f"{group}-0"]
        status, detail = FOUND[fault] if fault else ("scored", "")
        assert verdict.verdict == status, (fault, verdict.detail)
        assert (f"{group}-0" in told) == (status != "scored"), fault
        if status != "scored":
            line = told[f"{group}-0"]
            again = "" if status == "invalid" else " (2 attempts)"
            assert detail in line["detail"], fault
            assert verdict.detail == line["detail"] + again, fault
            assert line["attempts"] == (2 if again else 1), fault


async def test_bad_samples_in_a_row_end_no_run_whose_function_works(server_url: str, tmp_path: Path) -> None:
    """Those of some prompts fail together: eight of them in a row used to end the run."""
    faults = [None, *(["raises"] * 40), None]
    rollouts = [faulty(min(1, i) + (i - 1) // 8 if i else 0, fault) for i, fault in enumerate(faults)]
    rollouts = [
        Rollout(**{name: getattr(one, name) for name in one.packed()} | {"index": i % 8})
        for i, one in enumerate(rollouts)
    ]
    verdicts, _ = await scored_by_a_worker(server_url, tmp_path, rollouts, retries=0, children=1)
    statuses = [verdict.verdict for verdict in verdicts.values()]
    assert (statuses.count("scored"), statuses.count("error")) == (2, 40)


async def test_a_function_that_fails_for_all_ends_the_run_with_its_error(server_url: str, tmp_path: Path) -> None:
    """It did work, and then its judge went away, say: to drop every sample for ever would train nothing."""
    rollouts = [faulty(group, "raises" if group else None) for group in range(3 * FAILED_GROUPS_MAX)]
    with pytest.raises(UserError, match=rf"ValueError: no such unit .* in a row, for {FAILED_GROUPS_MAX} groups"):
        await scored_by_a_worker(server_url, tmp_path, rollouts, retries=0, children=1)


async def test_one_hung_call_of_four_takes_a_quarter_of_the_throughput_and_no_more(tmp_path: Path) -> None:
    """The ratio of two times in one run: 4 processes to 3 is 1.33; a worker that waited for it would take 20 s."""
    source = """
        import time
        def reward(response, task):
            time.sleep(20 if task.get("hang") else 0.02)
            return 1.0
    """
    async with running(tmp_path, source, children=4, timeout_s=20, retries=0) as pool:

        async def seconds(count: int = 40) -> float:
            """The least of three times: what else the machine does may double one of them."""
            times = []
            for _ in range(3):
                begin = time.monotonic()
                verdicts = await asyncio.gather(*(pool.score(request()) for _ in range(count)))
                assert all(verdict.status == "scored" for verdict in verdicts)
                times.append(time.monotonic() - begin)
            return min(times)

        await seconds(8)  # all four have started
        alone = await seconds()
        hung = asyncio.create_task(pool.score(request(hang=True)))
        await asyncio.sleep(0)
        beside = await seconds()
        assert not hung.done()
        hung.cancel()
    assert beside / alone < 2.0, f"{beside / alone:.2f}"
    print(f"a hung call of four: {beside / alone:.2f} times as long")
