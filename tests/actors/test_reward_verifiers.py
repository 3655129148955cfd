"""The built-in reward functions."""

from typing import Any

import pytest

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest
from actors.reward.verifiers import RewardFunction, Setting, load_builtin


def built_in(name: str, **options: Any) -> RewardFunction:
    return load_builtin(name, options, Setting())


exact, numeric = built_in("exact"), built_in("numeric")


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [(" yes\n", "yes", 1.0), ("Yes", "yes", 0.0), ("8", 8, 1.0), ("8.0", 8, 0.0), ("", "yes", 0.0)],
)
def test_exact_compares_text_but_for_its_ends(response: str, answer: Any, reward: float) -> None:
    """The strictest function: nothing but white space at the ends is forgiven."""
    assert exact(response, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("The answer is 8.", "8", 1.0),
        ("3+5=8", 8, 1.0),
        ("3+5=8, so not 9", 8, 0.0),
        ("It costs $1,234.50!", "1234.5", 1.0),
        ("1,234", "1,234", 1.0),
        ("12,34", 1234, 0.0),
        ("x = -3.5", -3.5, 1.0),
        ("x = \u22123.5", -3.5, 1.0),
        ("10-3", -3, 0.0),
        ("10-3", 3, 1.0),
        ("\\boxed{42}", 42, 1.0),
        ("50%", 50, 1.0),
        (".5", "1/2", 1.0),
        ("3/4", "0.75", 1.0),
        ("1/3", "1/3", 1.0),
        ("0.3333", "1/3", 0.0),
        ("0.33333333", "1/3", 1.0),
        ("1/0", 1, 0.0),
        ("12.0", 12, 1.0),
        ("1234568", 1234567, 0.0),
        ("2e3", 2000, 1.0),
        ("9" * 5000, "9" * 5000, 1.0),
        ("1e999999999", 5, 0.0),
        ("no number", 5, 0.0),
        ("an area of 12 cm^2", 12, 1.0),
        ("12 m^{2}", 12, 1.0),
        ("5 m^-2", 5, 1.0),
        ("5 m s^{-2}", 5, 1.0),
        ("2^10", 1024, 1.0),
        ("= 2^{10}", 10, 0.0),
        ("= 10^{-3}", 0.001, 1.0),
        ("10 ** 3", 10, 0.0),
        ("-2^2", -4, 1.0),
        ("3^100", 3**100, 1.0),
        ("7^999", 7, 0.0),
        ("0^-1", 0, 0.0),
        ("1e300^999", 5, 0.0),
        ("x = - 5", -5, 1.0),
        ("Answer:\n- 5", 5, 1.0),
        ("9 - 5", 5, 1.0),
        ("a loss of -$5.50", -5.5, 1.0),
        ("a loss of -\\$5", -5, 1.0),
        ("$10-$5", 5, 1.0),
        ("x = \u20135", -5, 1.0),
        ("pages 3\u20135", 5, 1.0),
        ("1 3/4 cups", 1.75, 1.0),
        ("-1 3/4", -1.75, 1.0),
        ("\\frac{3}{4}", 0.75, 1.0),
        ("$-\\dfrac34$", -0.75, 1.0),
        ("2\\frac{1}{2}", 2.5, 1.0),
        ("2 \\times 10^{3}", 2000, 1.0),
        ("1.5 x 10^-3 kg", 0.0015, 1.0),
        ("12 * 10 = 120", 120, 1.0),
        ("", 5, 0.0),
    ],
)
def test_numeric_compares_the_last_number(response: str, answer: Any, reward: float) -> None:
    """Replies say numbers in many ways; a whole answer has to be met exactly, another one closely."""
    assert numeric(response, {"answer": answer}) == reward


@pytest.mark.parametrize("task", [{}, {"answer": None}, {"answer": "a lot"}])
def test_a_row_without_a_usable_answer_is_an_error_and_no_zero(task: dict[str, Any]) -> None:
    """A fault of the data must not look like a fault of the model."""
    with pytest.raises(ValueError, match="answer"):
        numeric("5", task)


def test_numeric_takes_time_linear_in_the_reply() -> None:
    """Replies are written by a model: one of repeated digits, commas or signs must not stall a worker."""
    for unit in ("1,", "1,111", "-", "1/", "1e", "1.", "."):
        assert numeric(unit * 50_000 + " 7", {"answer": 7}) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("So the result is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("The answer is 17", "18", 0.0),
        ("I do not know", "18", 0.0),
    ],
)
def test_math_verify_compares_meaning(response: str, answer: str, reward: float) -> None:
    """Two ways to write one value are equal."""
    pytest.importorskip("math_verify")
    assert built_in("math_verify")(response, {"answer": answer}) == reward


def test_math_verify_refuses_an_answer_that_it_cannot_read() -> None:
    """Otherwise every reply to that row would be wrong."""
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="cannot read the answer ''"):
        built_in("math_verify")("5", {"answer": ""})


async def test_math_verify_runs_in_the_pool() -> None:
    """It computes on the child's main thread, with its package's own timeouts off."""
    pytest.importorskip("math_verify")
    pool = RewardPool(RewardConfig(function="math_verify", children=1))
    await pool.start()
    verdict = await pool.score(RewardRequest("s", "p", "$\\sqrt{4}$", "stop", {"answer": "2"}))
    await pool.close()
    assert (verdict.status, verdict.reward) == ("scored", 1.0)
