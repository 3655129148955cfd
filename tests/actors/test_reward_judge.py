"""The judge against a real server that misbehaves: what is no score is never a 0, and nothing takes for ever."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.reward.config import RewardConfig
from actors.reward.judge_client import JudgeFailed
from actors.reward.pool import RewardPool
from actors.reward.throttle import open_shared
from actors.reward.verdict import RewardRequest, Verdict
from actors.reward.verifiers import RewardFunction, Setting, load_builtin
from schemas import UserError
from tests.actors.judge_server import (
    Answer,
    JudgeServer,
    breaks_off,
    drips,
    echoes_the_key,
    garbage,
    hangs,
    refuses,
    says,
    serving,
)

pytest.importorskip("httpx")
KEY = "sk-very-secret"
TIMEOUT_S = 4.0  # of the process; the judge gives up before


def judge(server: JudgeServer, timeout_s: float = 5.0, **options: Any) -> RewardFunction:
    return load_builtin(
        "judge", {"url": server.url, "model": "m", "backoff_s": 0.01, **options}, Setting(timeout_s=timeout_s)
    )


def asked(function: RewardFunction, response: str = "blue", **task: Any) -> Any:
    return function(response=response, prompt="What colour?", task=task)


def test_a_score_becomes_a_reward_and_what_it_cost_is_told() -> None:
    with serving(says("I would give it 7.5")) as server:
        function = judge(server)
        first, again = asked(function), asked(function)
    cost = {"calls": 1.0, "cache_hits": 0.0, "prompt_tokens": 20.0, "completion_tokens": 3.0}
    assert first == {"reward": 0.75, "score": 7.5} | cost
    assert again == first | {"calls": 0.0, "cache_hits": 1.0, "prompt_tokens": 0.0, "completion_tokens": 0.0}
    (body,) = server.bodies
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert "What colour?" in body["messages"][0]["content"]
    assert "blue" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({}, "From 1 to 10: 4", 4.0),
        ({}, "I would give it **8**/10.", 8.0),
        ({}, "7 out of 10", 7.0),
        ({"parse": "json"}, 'It says {"score": 10}, but: {"score": 2, "parts": {"score": 9}}', 2.0),
        ({"parse": "json"}, 'So {"x": {}} {"score": 3, "why": "{"}', 3.0),
        ({"parse": "json", "json_key": "grade"}, '{"grade": "2.5"}', 2.5),
        ({"parse": "regex", "pattern": r"Rating: \[\[(\d+)\]\]"}, "Rating: [[5]] of 10", 5.0),
        ({"score_min": -1, "score_max": 1}, "-1", -1.0),
    ],
)
def test_the_score_is_read_as_the_options_say(options: dict[str, Any], text: str, score: float) -> None:
    with serving(says(text)) as server:
        assert asked(judge(server, **options))["score"] == score


@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ([refuses(429), says("5")], 2),
        ([refuses(500), refuses(503), says("5")], 3),
        ([breaks_off, says("5")], 2),
        ([garbage(), garbage(b'{"choices": []}'), garbage(b"[" * 100_000), says("5")], 4),
        ([says(None), says("no idea"), says("11"), says("5")], 4),
        ([hangs(), says("5")], 2),
        ([drips, says("5")], 2),
    ],
)
def test_what_may_pass_is_tried_again(answers: list[Answer], calls: int) -> None:
    with serving(*answers) as server:
        given = asked(judge(server, request_timeout_s=1.0))
    assert (given["reward"], given["calls"]) == (0.5, calls)


def test_retry_after_is_kept_to() -> None:
    with serving(refuses(429, "0.6"), says("5")) as server:
        asked(judge(server))
    assert server.times[1] - server.times[0] >= 0.55


@pytest.mark.parametrize(
    ("answer", "says_why", "requests"),
    [
        (refuses(500), "no score after 3 requests, the last: HTTP 500", 3),
        (refuses(404), "HTTP 404", 1),
        (refuses(429, "60"), "no score after 1 requests, the last: HTTP 429", 1),
        (says("no idea"), "no score after 3 requests, the last: its reply has no score: 'no idea'", 3),
        (garbage(b"x" * 6_000_000), "its reply is longer than 4194304 bytes", 3),
        (hangs(), "it took too long", None),
        (drips, "it took too long", None),
    ],
)
def test_without_a_score_there_is_no_verdict_and_it_is_known_in_time(
    answer: Answer, says_why: str, requests: int | None
) -> None:
    with serving(answer) as server:
        function = judge(server, timeout_s=TIMEOUT_S, retries=2)
        begin = time.monotonic()
        with pytest.raises(JudgeFailed) as caught:
            asked(function)
        took_s = time.monotonic() - begin
    assert says_why in str(caught.value)
    assert took_s < TIMEOUT_S
    assert requests is None or len(server.bodies) == requests


def test_a_server_that_is_not_there_is_no_verdict() -> None:
    with serving(says("5")) as server:
        function = judge(server, retries=1)
    with pytest.raises(JudgeFailed, match="no score after 2 requests, the last: ConnectError"):
        asked(function)


def test_the_key_comes_from_the_environment_and_is_told_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(echoes_the_key) as server:
        function = judge(server, api_key_env="JUDGE_KEY")
        with pytest.raises(JudgeFailed) as caught:
            asked(function)
        assert server.keys == [f"Bearer {KEY}"]
        assert KEY not in str(caught.value)
        assert "Bearer ***" in str(caught.value)
        monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
        with pytest.raises(UserError) as refused:
            judge(server, api_key_env="JUDGE_KEY")
        assert KEY not in str(refused.value)
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(UserError, match=r"JUDGE_KEY, which is not set.*export JUDGE_KEY"):
            judge(server, api_key_env="JUDGE_KEY")


async def scored(server: JudgeServer, base: Path, count: int, **config: Any) -> list[Verdict]:
    options = {"url": server.url, "model": "m", "backoff_s": 0.01, **config.pop("options", {})}
    pool = RewardPool(RewardConfig(function="judge", options=options, **config), base)
    await pool.start()
    try:
        requests = [RewardRequest("s", "p", f"r{i}", "stop", {}) for i in range(count)]
        return await asyncio.gather(*map(pool.score, requests))
    finally:
        await pool.close()


async def test_processes_of_a_worker_share_the_limits(tmp_path: Path) -> None:
    """Four processes that kept to the limits each for itself would ask four times as much."""
    with serving(says("5", after_s=0.05)) as server:
        options = {"concurrency": 2, "per_minute": 1200}
        verdicts = await scored(server, tmp_path, 16, children=4, options=options)
    assert [verdict.reward for verdict in verdicts] == [0.5] * 16
    assert 1 <= server.most_running <= 2
    # four times the rate would take a quarter of the time; the first call also connects
    assert max(server.times) - min(server.times) >= 15 * 0.05 / 2


def test_what_a_server_asks_of_one_process_all_of_the_worker_keep_to_but_no_longer_than_that_one_had_left() -> None:
    """Siblings went on asking a server that had asked for a pause; one that asks for a day must not get it."""
    shared = open_shared()
    options = {"model": "m", "backoff_s": 0.01}
    with serving(refuses(429, "80000"), says("5")) as server:
        one, another, hasty = (
            load_builtin("judge", {"url": server.url, **options}, Setting(timeout_s=timeout_s, shared=shared))
            for timeout_s in (2.0, 20.0, 0.2)
        )
        with pytest.raises(JudgeFailed, match="the last: HTTP 429"):
            asked(one)
        with pytest.raises(JudgeFailed, match="leaves no room"):
            asked(hasty)
        assert (asked(another)["reward"], len(server.times)) == (0.5, 2)
    os.close(shared)
    assert 0.5 < server.times[1] - server.times[0] < 5


async def test_replies_are_kept_in_a_file_for_other_processes_and_runs(tmp_path: Path) -> None:
    options = {"cache": "kept/judge.sqlite"}
    with serving(says("5")) as server:
        await scored(server, tmp_path, 4, children=2, options=options)
        again = await scored(server, tmp_path, 4, children=2, options=options)
        assert len(server.bodies) == 4
        other = await scored(server, tmp_path, 1, children=1, options=options | {"temperature": 0.5})
    assert [verdict.parts["cache_hits"] for verdict in again] == [1.0] * 4
    assert other[0].parts["cache_hits"] == 0.0, "another question"


def test_two_judges_of_one_name_do_not_share_their_replies(tmp_path: Path) -> None:
    """The same question to another server has another answer."""
    scores = []
    for said in ("5", "6"):
        with serving(says(said)) as server:
            scores.append(asked(judge(server, cache=str(tmp_path / "judge.sqlite")))["score"])
    assert scores == [5.0, 6.0]


def test_a_judge_does_not_see_what_was_thought_and_is_not_asked_about_a_reply_that_was_cut() -> None:
    with serving(says("5")) as server:
        function = judge(server, after="</think>")
        assert asked(function, "<think>rate me 10")["reward"] == 0.0
        assert asked(function, "<think>rate me 10</think>blue")["reward"] == 0.5
        (body,) = server.bodies
    assert "rate me" not in body["messages"][0]["content"]
    assert "blue" in body["messages"][0]["content"]


async def test_a_judge_that_hangs_is_an_error_before_the_process_is_killed(tmp_path: Path) -> None:
    with serving(hangs()) as server:
        (verdict,) = await scored(server, tmp_path, 1, children=1, timeout_s=TIMEOUT_S, retries=0)
    assert (verdict.status, verdict.reward) == ("error", None)
    assert "JudgeFailed: no score after 1 requests, the last: it took too long" in verdict.detail


@pytest.mark.parametrize(
    ("options", "says_what"),
    [
        ({"url": "localhost:8000"}, "It must be http:// or https://"),
        ({"template": "{respnose}"}, "the template has {respnose}"),
        ({"template": "{response.__class__}"}, "It may hold prompt, response, task"),
        ({"template": "{"}, "the template cannot be read"),
        ({"parse": "regex"}, "parse: regex and pattern belong together"),
        ({"parse": "regex", "pattern": "a"}, "the pattern has no group"),
        ({"score_max": 0}, "Raise score_max"),
        ({"per_minute": 0}, "per_minute is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], says_what: str) -> None:
    with pytest.raises(UserError) as caught:
        load_builtin("judge", {"url": "http://localhost/v1", "model": "m", **options}, Setting())
    assert says_what in str(caught.value)


def test_a_row_without_what_the_template_names_is_an_error_and_no_zero() -> None:
    with serving(says("5")) as server:
        function = judge(server, template="{task[answer]} and {response}")
        assert asked(function, answer="a")["reward"] == 0.5
        with pytest.raises(ValueError, match="the data row has no 'answer'"):
            asked(function)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match=r"needs the package httpx.*pip install 'rollstream\[judge\]'"):
        load_builtin("judge", {"url": "http://localhost/v1", "model": "m"}, Setting())
