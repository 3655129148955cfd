"""A model of some kB that babbles, and a reward that is often equal within a group, so that some groups are dropped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.running_total import make_model as make_larger_model


def make_model(path: Path, seed: int) -> None:
    """The model of the default recipe with an eighth of its width and one layer, and its tokenizer."""
    import torch
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

    make_larger_model(path, seed)
    larger = AutoConfig.from_pretrained(path)
    config = Qwen3Config(
        vocab_size=larger.vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(path)


def reward(response: str, task: Mapping[str, Any], finish: str) -> float:
    """The length in sixteens of words, which is equal in many a group."""
    return len(response.split()) // 16 / 4
