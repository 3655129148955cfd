"""`math_verify` says what the package says, for a thousand answers, and no expression can hold up a worker."""

import asyncio
import logging
import signal
import time
from typing import Any

import pytest

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest, Verdict
from actors.reward.verifiers import Setting, load_builtin
from tests.actors.math_answers import MathAnswer, math_answers

math_verify = pytest.importorskip("math_verify")

ENDLESS = ("\\boxed{9^{9^{9^{9}}}}", "$(x+1)^{100000}$")
DIRECT_EVERY = 8  # a second opinion on each costs as much CPU as the first


def ask(answer: MathAnswer) -> RewardRequest:
    return RewardRequest("s", "p", answer.response, "stop", {"answer": answer.answer})


def directly(answer: MathAnswer) -> bool:
    expected = math_verify.parse(f"${answer.answer}$", parsing_timeout=None)
    found = math_verify.parse(answer.response, parsing_timeout=None)
    return bool(math_verify.verify(expected, found, timeout_seconds=None))


async def verdicts(answers: list[MathAnswer], **config: float) -> list[Verdict]:
    pool = RewardPool(RewardConfig(function="math_verify", **config))  # type: ignore[arg-type]
    await pool.start()
    try:
        return await asyncio.gather(*(pool.score(ask(answer)) for answer in answers))
    finally:
        await pool.close()


async def test_a_thousand_answers_get_the_verdicts_that_they_must() -> None:
    """Each is known from how the answer was made, and is what math-verify itself says when it is called directly."""
    logging.getLogger("math_verify").setLevel("ERROR")
    answers = math_answers(1000)
    given = [verdict.reward for verdict in await verdicts(answers, children=2, timeout_s=10)]
    pairs = list(zip(answers, given, strict=True))
    assert [a for a, got in pairs if got != a.right] == []
    assert [a for a, got in pairs[::DIRECT_EVERY] if got != directly(a)] == []


@pytest.mark.parametrize("response", ENDLESS)
async def test_an_expression_that_never_ends_is_a_timeout_and_holds_up_nobody(response: str) -> None:
    """It stays inside C code, where no alarm is heard; its process is killed while the other one scores on."""
    pool = RewardPool(RewardConfig(function="math_verify", children=2, timeout_s=5, retries=0))
    await pool.start()
    try:
        await asyncio.gather(*(pool.score(ask(answer)) for answer in math_answers(4)))  # both processes are up
        begin = time.monotonic()
        endless = asyncio.create_task(pool.score(ask(MathAnswer(response, "7", False))))
        await asyncio.sleep(0)
        scoring = [asyncio.create_task(pool.score(ask(answer))) for answer in math_answers(20)]
        await asyncio.wait([endless, *scoring], return_when=asyncio.FIRST_COMPLETED)
        assert not endless.done(), "the others are scored meanwhile"
        others = await asyncio.gather(*scoring)
        verdict = await endless
    finally:
        await pool.close()
    assert [other.status for other in others] == ["scored"] * 20
    assert (verdict.status, verdict.reward) == ("timeout", None)
    assert time.monotonic() - begin < 60


def test_no_alarm_is_set_since_the_packages_own_timeouts_would_count_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "alarm", lambda seconds: pytest.fail("an alarm"))
    assert load_builtin("math_verify", {}, Setting())("$2$", {"answer": "2"}) == 1.0


@pytest.mark.parametrize(
    ("options", "response", "answer", "reward"),
    [
        ({"extract": "boxed"}, "\\boxed{2\\sqrt{3}} and then 7", "\\sqrt{12}", 1.0),
        ({"extract": "boxed"}, "it is 7", "7", 0.0),
        ({"extract_answer": "boxed"}, "$7$", "We add up: \\boxed{7}", 1.0),
        ({"extract": "hashes"}, "so 9\n#### 7", "7", 1.0),
        ({"decimals": 2}, "$0.333$", "0.3333", 1.0),
        ({}, "it is 17 apples", "17 apples", 1.0),
    ],
)
def test_the_options_of_math_verify(options: dict[str, Any], response: str, answer: str, reward: float) -> None:
    assert load_builtin("math_verify", options, Setting())(response, {"answer": answer}) == reward


def test_a_bare_answer_in_latex_is_read_as_latex() -> None:
    """As plain text math-verify took the 3 of `2\\sqrt{3}` alone for the answer, and 3 was right."""
    function = load_builtin("math_verify", {}, Setting())
    assert [function(f"\\boxed{{{reply}}}", {"answer": "2\\sqrt{3}"}) for reply in ("\\sqrt{12}", "3")] == [1.0, 0.0]
