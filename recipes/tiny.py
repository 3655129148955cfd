"""The tiny models that the recipes learn with: made on the spot, of any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_model(path: Path, seed: int, words: Sequence[str], positions: int) -> None:
    """Write a fresh model of about 0.1 million parameters and a tokenizer that takes each of `words` for a token.

    Words stand apart by spaces; the first three are padding, end and unknown. `positions`: the longest context, tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    write_with_tokenizer(path, seed, tokenizer, words, positions)


def write_with_tokenizer(
    path: Path, seed: int, tokenizer: Any, words: Sequence[str], positions: int, **options: Any
) -> None:
    """As `write_model`, with a `tokenizers.Tokenizer` of one's own and options of transformers' tokenizer."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers types its own only in part
        tokenizer_object=tokenizer,
        pad_token=words[0],
        eos_token=words[1],
        unk_token=words[2],
        padding_side="left",
        **options,
    )
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.1,  # the usual 0.02 learns far more slowly at this width
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
