"""The model, the data and the reward of the test with agents from outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any


def draw(rng: Random) -> dict[str, Any]:
    """A row with an answer that no agent is to see."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)}


def reward(response: str, task: Mapping[str, Any], finish: str) -> float:
    """The share of characters that occur but once: it varies among the samples of a group."""
    return len(set(response)) / (len(response) + 1)


def make_model(path: Path, seed: int) -> None:
    """An untrained model of bytes with a chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.actors.endpoint.chat_model import save_tokenizer

    config = Qwen3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=256,
        eos_token_id=258,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    save_tokenizer(path)
