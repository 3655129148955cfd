"""The reward pool over real child processes: whatever a user's function does, a verdict comes and nothing is left."""

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from actors.reward.config import RewardConfig
from actors.reward.pool import PoolClosed, RewardPool
from actors.reward.verdict import RewardRequest, Verdict
from schemas import UserError
from tests.actors.reward_pools import request, running, verdict_of
from tests.waiting import alive, eventually

ROOT = Path(__file__).resolve().parents[2]


async def test_a_function_gets_what_its_parameters_name_and_nothing_else(tmp_path: Path) -> None:
    """A user writes only the parameters that matter; more would be a TypeError, fewer a wrong reward."""
    source = """
        def reward(response, task, finish, sample_id, tokens):
            assert (response, task["answer"], finish, sample_id, tokens) == ("5", "5", "length", "g1/0", [7, 1])
            return 1
    """
    async with running(tmp_path, source) as pool:
        verdict = await pool.score(request(finish="length"))
    assert (verdict.status, verdict.reward, verdict.detail) == ("scored", 1.0, "")


async def test_a_function_that_takes_anything_gets_everything(tmp_path: Path) -> None:
    """`**extra` is how a function asks for all there is."""
    source = "def reward(response, **extra): return len(extra)"
    assert (await verdict_of(tmp_path, source)).reward == 6


async def test_a_dict_gives_the_reward_and_named_parts(tmp_path: Path) -> None:
    """Parts are for the logs; the reward is not repeated among them."""
    verdict = await verdict_of(tmp_path, "def reward(response): return {'reward': 0.75, 'format': True, 'length': 2}")
    assert (verdict.status, verdict.reward, verdict.parts) == ("scored", 0.75, {"format": 1.0, "length": 2.0})


async def test_the_prompt_may_be_chat_messages(tmp_path: Path) -> None:
    """Rows may hold messages instead of text; they reach the function as they are."""
    messages = [{"role": "user", "content": "2+3="}]
    async with running(tmp_path, "def reward(prompt): return len(prompt[0]['content'])") as pool:
        assert (await pool.score(RewardRequest("s", messages, "", "stop", {}))).reward == 4


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        ("None", "the reward is NoneType, not a number"),
        ("'1'", "the reward is str, not a number"),
        ("float('nan')", "the reward is nan, not a finite number"),
        ("float('-inf')", "the reward is -inf, not a finite number"),
        ("10 ** 400", "the reward is inf, not a finite number"),
        ("{'score': 1.0}", "the returned dict has no 'reward', only ['score']"),
        ("{'reward': 1.0, 'format': None}", "the part 'format' is NoneType, not a number"),
        ("[1.0]", "the reward is list, not a number"),
    ],
)
async def test_what_is_no_finite_number_is_invalid_and_not_tried_again(
    tmp_path: Path, returned: str, detail: str
) -> None:
    """A bug in the function would give the same again; read as 0 it would teach the model something false."""
    verdict = await verdict_of(tmp_path, f"def reward(response): return {returned}", retries=3)
    assert (verdict.status, verdict.reward, verdict.detail, verdict.attempts) == ("invalid", None, detail, 1)


async def test_scalars_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Functions that compute with numpy return its scalars."""
    source = "import numpy\ndef reward(response): return {'reward': numpy.float32(0.5), 'ok': numpy.bool_(True)}"
    verdict = await verdict_of(tmp_path, source)
    assert (verdict.reward, verdict.parts) == (0.5, {"ok": 1.0})


async def test_an_exception_is_an_error_with_its_last_line_and_place(tmp_path: Path) -> None:
    """The detail is what a person sees first: it must say what and where. The process goes on."""
    source = """
        import os
        def reward(response, task):
            if task.get("fail"):
                raise ValueError("no such unit")
            return os.getpid()
    """
    async with running(tmp_path, source, retries=1) as pool:
        before = await pool.score(request())
        failed = await pool.score(request(fail=True))
        after = await pool.score(request())
    assert (failed.status, failed.reward, failed.attempts) == ("error", None, 2)
    assert failed.detail == "ValueError: no such unit (rewards.py, line 5)"
    assert before.reward == after.reward, "an exception needs no new process"


async def test_a_retry_may_succeed(tmp_path: Path) -> None:
    """An infrastructure error is tried again before it costs the sample."""
    source = """
        from pathlib import Path
        def reward(response):
            seen = Path(__file__).with_name("seen")
            if seen.exists():
                return 1.0
            seen.touch()
            raise ConnectionError("the judge is away")
    """
    verdict = await verdict_of(tmp_path, source, retries=2)
    assert (verdict.status, verdict.reward, verdict.attempts) == ("scored", 1.0, 2)


@pytest.mark.parametrize(
    ("end", "detail"),
    [
        ("os._exit(3)", "it exited with status 3; last output: about to end"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "it was killed by SIGSEGV; last output: about to end"),
    ],
)
async def test_a_process_that_dies_is_an_error_and_is_replaced(tmp_path: Path, end: str, detail: str) -> None:
    """A crash in native code, or the machine's memory killer, costs one sample, not the run."""
    source = f"""
        import os, signal
        def reward(response, task):
            if task.get("die"):
                print("about to end")
                {end}
            return 1.0
    """
    async with running(tmp_path, source, retries=0) as pool:
        died = await pool.score(request(die=True))
        after = await pool.score(request())
    assert (died.status, died.reward, died.detail) == ("error", None, f"the reward process failed: {detail}")
    assert after.status == "scored"


async def test_leaving_by_sys_exit_is_an_error(tmp_path: Path) -> None:
    """An early exit must never pass for an answer."""
    verdict = await verdict_of(tmp_path, "import sys\ndef reward(response): sys.exit(0)", retries=0)
    assert (verdict.status, verdict.detail) == ("error", "SystemExit: 0 (rewards.py, line 2)")


async def test_the_timeout_counts_from_the_calls_own_start(tmp_path: Path) -> None:
    """A slow import, or the wait for a free process, is no fault of the function."""
    source = """
        import time
        time.sleep(1.5)
        def reward(response): time.sleep(0.3); return 1.0
    """
    async with running(tmp_path, source, timeout_s=1.4, children=1, retries=0) as pool:
        verdicts = await asyncio.gather(*(pool.score(request()) for _ in range(5)))
    assert [v.status for v in verdicts] == ["scored"] * 5
    assert all(0.3 <= v.seconds < 1.4 for v in verdicts)


async def test_a_function_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """A child process left behind, even one in a session of its own, would eat the machine bit by bit."""
    source = f"""
        import os, subprocess, sys, time
        def reward(response, task):
            if not task.get("hang"):
                return 1.0
            plain = subprocess.Popen(["sleep", "600"])
            detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
            open("{tmp_path}/pids", "w").write(f"{{os.getpid()}} {{plain.pid}} {{detached.pid}}")
            print("waiting")
            time.sleep(600)
    """
    async with running(tmp_path, source, timeout_s=2.0, retries=0, children=1) as pool:
        verdict = await pool.score(request(hang=True))
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert [pid for pid in pids if alive(pid)] == [], "all are gone when the verdict comes"
        assert (await pool.score(request())).status == "scored", "a new process takes over"
    assert (verdict.status, verdict.reward, verdict.seconds) == ("timeout", None, 2.0)
    assert verdict.detail == "the reward function gave no answer within 2 s; last output: waiting"


async def test_a_hang_that_holds_the_interpreter_lock_is_killed(tmp_path: Path) -> None:
    """A regular expression that backtracks for ever runs no signal handler and no other thread of its process."""
    source = "import re\ndef reward(response): re.match('(a+)+$', 'a' * 64 + 'b'); return 0.0"
    verdict = await verdict_of(tmp_path, source, timeout_s=0.5, retries=1)
    assert (verdict.status, verdict.attempts) == ("timeout", 2)


async def test_a_flood_of_output_neither_blocks_nor_corrupts(tmp_path: Path) -> None:
    """Prints go elsewhere than the protocol, are read all the time, and only their end is kept."""
    source = """
        import os, sys
        def reward(response):
            for _ in range(200):
                print("x" * 50_000)
                os.write(1, b"y" * 50_000)
                sys.stderr.write("z" * 50_000)
            return 1.0
    """
    async with running(tmp_path, source, children=1) as pool:
        assert (await pool.score(request())).status == "scored"
        (child,) = pool._alive
        assert len(child._output) <= 2048


async def test_a_function_cannot_read_the_next_request_from_its_standard_input(tmp_path: Path) -> None:
    """A stray `input()` must fail at once instead of eating the protocol."""
    verdict = await verdict_of(tmp_path, "def reward(response): return float(input())", retries=0)
    assert (verdict.status, verdict.detail[:8]) == ("error", "EOFError")


async def test_a_forked_process_that_holds_the_pipe_does_not_hide_the_childs_death(tmp_path: Path) -> None:
    """A fork inherits the protocol's pipe; without its removal the pool would wait for the whole timeout."""
    source = """
        import os, time
        def reward(response):
            if os.fork() == 0:
                time.sleep(600)
            os._exit(1)
    """
    begin = time.monotonic()
    verdict = await verdict_of(tmp_path, source, timeout_s=60, retries=0)
    assert verdict.status == "error"
    assert time.monotonic() - begin < 20


async def test_no_more_calls_run_than_there_are_children_and_they_start_in_order(tmp_path: Path) -> None:
    """The bound protects the machine; the order keeps a long queue from starving its oldest sample."""
    source = f"""
        import os, time
        log = os.open("{tmp_path}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        def reward(response):
            os.write(log, f"+{{response}} ".encode())
            time.sleep(0.05)
            os.write(log, f"-{{response}} ".encode())
            return 1.0
    """
    async with running(tmp_path, source, children=2) as pool:
        await asyncio.gather(*(pool.score(request()) for _ in range(2)))  # start both
        (tmp_path / "log").write_text("")
        await asyncio.gather(*(pool.score(request(str(i))) for i in range(12)))
    events = (tmp_path / "log").read_text().split()
    running_calls = [sum(1 if e[0] == "+" else -1 for e in events[: i + 1]) for i in range(len(events))]
    assert max(running_calls) <= 2
    for number in range(12):
        before = events[: events.index(f"+{number}")]
        ended = sum(event[0] == "-" and int(event[1:]) < number for event in before)
        assert ended >= number - 1, "when one starts, all before it have ended but for the other that runs"


async def test_one_child_serves_strictly_in_order(tmp_path: Path) -> None:
    """With one child first in, first out is exact."""
    async with running(
        tmp_path, "seen = []\ndef reward(response): seen.append(1); return len(seen)", children=1
    ) as pool:
        verdicts = await asyncio.gather(*(pool.score(request()) for _ in range(20)))
    assert [v.reward for v in verdicts] == list(range(1, 21))


async def test_children_are_started_only_when_needed(tmp_path: Path) -> None:
    """A process costs memory; one request after another needs one."""
    async with running(tmp_path, "def reward(response): return 1.0", children=8) as pool:
        for _ in range(3):
            await pool.score(request())
        assert len(pool._alive) == 1


async def test_a_cancelled_request_kills_its_call_and_frees_its_place(tmp_path: Path) -> None:
    """A worker that shuts down cancels its handlers; nobody would collect the answer."""
    source = "import time\ndef reward(response, task): time.sleep(task.get('sleep', 0)); return 1.0"
    async with running(tmp_path, source, children=1) as pool:
        slow = asyncio.create_task(pool.score(request(sleep=600)))
        await asyncio.sleep(0.3)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await asyncio.wait_for(pool.score(request()), 30)).status == "scored"


async def test_closing_leaves_no_verdict_for_what_was_not_answered(tmp_path: Path) -> None:
    """A sample that was only interrupted must be scored later, not be dropped as an error."""
    async with running(tmp_path, "import time\ndef reward(response): time.sleep(600)", children=1) as pool:
        calls = [asyncio.create_task(pool.score(request())) for _ in range(3)]
        await asyncio.sleep(0.2)
        pids = [child._process.pid for child in pool._alive]
        await asyncio.wait_for(pool.close(), 30)
        for call in calls:
            with pytest.raises(PoolClosed):
                await call
        assert [pid for pid in pids if alive(pid)] == []


async def test_a_sample_that_cannot_be_sent_is_an_error_and_keeps_the_process(tmp_path: Path) -> None:
    """Only the sample is at fault: a task that msgpack cannot carry."""
    async with running(tmp_path, "import os\ndef reward(task): return os.getpid()", children=1) as pool:
        before = await pool.score(request())
        verdict = await pool.score(request(big=1 << 70))
        after = await pool.score(request())
    assert verdict.status == "error"
    assert verdict.detail.startswith("the sample cannot be sent to the reward function")
    assert before.reward == after.reward


async def test_a_forged_reply_is_refused(tmp_path: Path) -> None:
    """User code that finds the protocol's descriptor must not be able to fill memory or invent a NaN reward."""
    source = """
        import os, struct
        def reward(response, task):
            for fd in range(3, 20):
                try: os.write(fd, bytes.fromhex(task["forged"]))
                except OSError: pass
            return 1.0
    """
    async with running(tmp_path, source, retries=0, timeout_s=5) as pool:
        huge = await pool.score(request(forged="ffffffff00"))
        junk = await pool.score(request(forged="00000001c1"))
        other = await pool.score(request(forged="0000000181a161"))
    assert {huge.status, junk.status, other.status} == {"error"}
    assert "broke the protocol: a reply of 4294967295 bytes" in huge.detail


async def fails_to_start(config: RewardConfig, base: Path) -> UserError:
    pool = RewardPool(config, base)
    try:
        with pytest.raises(UserError) as caught:
            await pool.start()
    finally:
        await pool.close()
    return caught.value


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("reward.py:reward", ["there is no file", "reward.py", "Did you mean rewards.py?"]),
        ("rewards.py:rewrad", ["has no function rewrad", "Did you mean reward?"]),
        ("no_such_package.rewards:reward", ["there is no module no_such_package"]),
        ("numerc", ["no built-in function", "Did you mean numeric?"]),
        ("rewards.py:LIMIT", ["is a int, not a function"]),
        ("rewards.py:later", ["is asynchronous"]),
        ("rewards.py:wants_more", ["wants 'completion', which rewards are not given", "prompt, response, task"]),
        ("broken.py:reward", ["broken.py, line 2 failed with ModuleNotFoundError: No module named 'no_such_module'"]),
        ("dying.py:reward", ["ended: it exited with status 4"]),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_known_at_start(
    tmp_path: Path, function: str, says: list[str]
) -> None:
    """A typing error must show in the first second, with the remedy, not as a thousand error verdicts."""
    (tmp_path / "rewards.py").write_text(
        "LIMIT = 3\ndef reward(response): return 1\nasync def later(response): return 1\n"
        "def wants_more(completion): return 1\n"
    )
    (tmp_path / "broken.py").write_text("import os\nimport no_such_module\n")
    (tmp_path / "dying.py").write_text("import os\nos._exit(4)\n")
    error = await fails_to_start(RewardConfig(function=function), tmp_path)
    assert all(part in str(error) for part in says), str(error)


async def test_an_import_that_never_ends_is_known_at_start(tmp_path: Path) -> None:
    """Its own, generous limit: otherwise the run would wait for ever without a word."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)")
    error = await fails_to_start(RewardConfig(function="slow.py:reward", start_timeout_s=1.0), tmp_path)
    assert error.message == "Loading the reward function 'slow.py:reward' took more than 1 s."


async def test_a_child_imports_no_torch() -> None:
    """Children are started again after each timeout, and several run at once: they must stay light."""
    code = "import sys, actors.reward.child; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT)
    assert await process.wait() == 0


async def test_nothing_survives_a_kill_of_the_parent(tmp_path: Path) -> None:
    """`kill -9` runs no clean-up; the kernel's word to the guard has to do, also for a child stuck in C code."""
    (tmp_path / "rewards.py").write_text(
        textwrap.dedent(f"""
        import os, re, subprocess
        def reward(response):
            grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
            open("{tmp_path}/pids", "w").write(f"{{os.getppid()}} {{os.getpid()}} {{grandchild.pid}}\\n")
            re.match('(a+)+$', 'a' * 64 + 'b')
        """)
    )
    script = f"""
        import asyncio
        from pathlib import Path
        from actors.reward.config import RewardConfig
        from actors.reward.pool import RewardPool
        from actors.reward.verdict import RewardRequest
        pool = RewardPool(RewardConfig(function="rewards.py:reward", timeout_s=600), Path({str(tmp_path)!r}))
        async def main(): await pool.score(RewardRequest("s", "p", "r", "stop", {{}}))
        asyncio.run(main())
    """
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(script), cwd=ROOT)
    written = tmp_path / "pids"
    await eventually(lambda: written.exists() and written.read_text().endswith("\n"), 30)
    pids = [int(pid) for pid in written.read_text().split()]
    assert [alive(pid) for pid in pids] == [True] * 3
    parent.kill()
    await parent.wait()
    await eventually(lambda: not any(alive(pid) for pid in pids))


async def test_a_trivial_reward_costs_little() -> None:
    """The pool must not be what limits a run: at most 0.2 ms of CPU a reward, parent and child together (5x slack)."""
    pool = RewardPool(RewardConfig(function="exact", children=1))
    await pool.start()
    (child,) = pool._alive
    guard = child._process.pid

    def child_s() -> float:
        worker = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0]
        fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def score(count: int) -> None:
        for _ in range(count):
            await pool.score(request())

    await score(50)
    begin = time.process_time() + child_s()
    await score(1000)
    spent_ms = time.process_time() + child_s() - begin
    await pool.close()
    assert spent_ms < 1.0, f"{spent_ms:.3f} ms of CPU a reward"


def test_requests_wait_for_their_turn_also_after_a_failure() -> None:
    """A semaphore that lost a place at each failure would end with none."""

    async def main() -> list[Verdict]:
        pool = RewardPool(RewardConfig(function="exact", children=1, retries=0))
        bad = RewardRequest("s", "p", "5", "stop", {})  # the row has no answer
        calls: list[Awaitable[Verdict]] = [pool.score(bad if i % 2 else request()) for i in range(8)]
        verdicts = await asyncio.gather(*calls)
        await pool.close()
        return verdicts

    assert [v.status for v in asyncio.run(main())] == ["scored", "error"] * 4
