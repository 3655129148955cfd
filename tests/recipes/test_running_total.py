"""The default task."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from recipes.running_total import TERMS_MAX, TOTAL_MAX, WORDS, demonstration, make_model, problem, reward

TASK = {"prompt": "a 7 b +8 c -3 =", "answer": "12"}


@pytest.mark.parametrize(
    ("response", "finish", "expected"),
    [
        ("# 12", "stop", 1.0),
        ("b +8 15 c -3 12 # 12", "stop", 1.0),
        ("b +8 3 c -3 1 # 12", "stop", 1.0),  # only the answer counts
        ("#12", "stop", 1.0),
        ("# 12", "length", 0.0),
        ("# 13", "stop", 0.0),
        ("# 12 # 12", "stop", 0.0),
        ("# 13 # 12", "stop", 0.0),
        ("# 1 2", "stop", 0.0),
        ("# 012", "stop", 0.0),
        ("# +12", "stop", 0.0),
        ("12", "stop", 0.0),
        ("#", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_only_the_exact_answer_of_a_finished_reply_counts(response: str, finish: str, expected: float) -> None:
    """A reward with a gap would be found and used by the policy."""
    assert reward(response, TASK, finish) == expected


def test_problems_are_consistent_and_their_lengths_have_a_long_tail() -> None:
    """The tail is what makes the task a test of asynchronous training."""
    rng = Random(0)
    tasks = [problem(rng) for _ in range(4000)]
    for task in tasks:
        totals = [task["start"]]
        for move in task["moves"]:
            totals.append(totals[-1] + move)
        assert all(0 <= total <= TOTAL_MAX for total in totals)
        assert task["answer"] == str(totals[-1])
        assert set(task["prompt"].split()) <= set(WORDS)
    terms = sorted(len(task["moves"]) + 1 for task in tasks)
    assert (terms[0], terms[-1]) == (2, TERMS_MAX)
    assert 5 <= terms[len(terms) // 2] <= 7
    assert terms[int(0.95 * len(terms))] >= 18


def test_the_demonstrated_habits_change_in_the_last_fifth() -> None:
    """What reinforcement learning has to undo: bare answers and slips."""

    def habits(progress: float) -> tuple[float, float]:
        """Share of bare answers, and of wrong answers among the others."""
        rng, again, seen = Random(1), Random(1), Counter[str]()
        for _ in range(1500):
            again.setstate(rng.getstate())
            task = problem(again)  # a demonstration draws its problem first
            prompt, response = demonstration(rng, progress)
            assert prompt == task["prompt"]
            assert set(response.split()) <= set(WORDS)
            bare = response.startswith("#")
            assert not bare or reward(response, task, "stop") == 1.0
            seen["bare" if bare else "right" if reward(response, task, "stop") else "wrong"] += 1
        return seen["bare"] / 1500, seen["wrong"] / (seen["wrong"] + seen["right"])

    early_bare, early_wrong = habits(0.79)
    late_bare, late_wrong = habits(0.81)
    assert early_bare == pytest.approx(0.1, abs=0.03)
    assert early_wrong == 0
    assert late_bare == pytest.approx(0.8, abs=0.04)
    assert 0.1 < late_wrong < 0.4


def test_the_model_has_103232_parameters_and_a_word_is_a_token(tmp_path: Path) -> None:
    """Its size decides that a run takes minutes; text must survive the way to tokens and back."""
    transformers = pytest.importorskip("transformers")
    make_model(tmp_path, seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 103_232  # 0.103 million
    prompt, response = demonstration(Random(3), 0.5)
    tokens = tokenizer(prompt)["input_ids"]
    assert len(tokens) == len(prompt.split())
    assert tokenizer.unk_token_id not in tokens
    reply = [*tokenizer(response)["input_ids"], model.config.eos_token_id]
    assert tokenizer.decode(reply, skip_special_tokens=True) == response


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    """Runs are repeatable, and runs over seeds differ."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
