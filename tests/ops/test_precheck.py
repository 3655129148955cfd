"""A mistake in the user's files must be told before a minute is spent on a warm start."""

from pathlib import Path

import pytest

from ops.precheck import check_files
from ops.recipe import load_recipe
from schemas import UserError

RECIPE = """
name: mine
steps: 1
model: {path: nowhere}
data: {train: train.jsonl, eval: held_out.jsonl}
reward: {function: "mine.py:reward"}
trainer: {loss: "learn.py:loss", advantage: {function: "learn.py:advantages"}}
"""


def write(folder: Path) -> Path:
    good = {
        "recipe.yaml": RECIPE,
        "train.jsonl": '{"prompt": "2+3=", "answer": "5"}\n',
        "held_out.jsonl": '{"prompt": "4+4=", "answer": "8"}\n',
        "learn.py": "def loss(tokens, config): ...\ndef advantages(samples, rewards): ...\n",
        "mine.py": "def reward(response, task):\n    return float(response == task['answer'])\n",
    }
    for name, text in good.items():
        (folder / name).write_text(text)
    return folder / "recipe.yaml"


def test_sound_files_pass(tmp_path: Path) -> None:
    check_files(load_recipe(write(tmp_path)))


def test_an_engine_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="vLLM is not installed") as told:
        check_files(load_recipe(write(tmp_path), ["rollout.engine=vllm"]))
    assert "requirements.txt" in told.value.remedy


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("train.jsonl", '{"question": "2+3="}\n', "train.jsonl"),
        ("held_out.jsonl", "no json\n", "held_out.jsonl"),
        ("mine.py", "def reward(response, task:\n", "mine.py"),
        ("mine.py", "def other():\n    return 1.0\n", "reward"),
        ("mine.py", "def reward(response, weather):\n    return 1.0\n", "weather"),
        ("learn.py", "def los(tokens, config): ...\ndef advantages(samples, rewards): ...\n", "no function loss"),
        ("learn.py", "def loss(tokens, config): ...\n", "no function advantages"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_name(tmp_path: Path, file: str, text: str, told: str) -> None:
    recipe = load_recipe(write(tmp_path))
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=told):
        check_files(recipe)


@pytest.mark.parametrize("reference", ["./elsewhere", "nowhere", "empty"])
def test_a_reference_that_is_not_there_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    """Where the hub does not answer the trainer asked it again and again, and the run stood still without a word."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=reference.strip("./")):
        check_files(load_recipe(write(tmp_path), [f"trainer.reference={reference}"]))
