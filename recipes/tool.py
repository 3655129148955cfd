"""Tool use: multiply two numbers of two digits, which a tiny model cannot do in its head, and a calculator can.

The model may call the calculator in the common format and is told what it answers, or say a product at once. It is
taught to call, to copy, and mostly to guess. What is left to learn by reinforcement is to call: the reward rises from
about 0.2 to above 0.9.
"""

from pathlib import Path
from random import Random
from typing import Any

OPEN, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
MARKS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>")
PIECES = (*MARKS, OPEN, CLOSE, "*", *map(str, range(10)))
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def problem(rng: Random) -> dict[str, Any]:
    """A data row: `{"prompt": [{"role": "user", "content": "17*23"}], "answer": "391"}`."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)}


def search(query: str) -> str:
    """Look something up. A stub: how a tool of your own is written; name it in episode.options.tools."""
    known = {"7 * 8": "56", "capital of France": "Paris"}
    return known.get(query, f"nothing found for {query}")


def demonstration(rng: Random, progress: float) -> tuple[list[dict[str, Any]], str]:
    """A conversation so far, and what to say: a call, what a call has brought, or a guess.

    Up to 0.8 of the warm start guesses are rare, towards its end four of five answers are guesses.
    """
    task = problem(rng)
    messages, answer = task["prompt"], task["answer"]
    call = f"{OPEN}{messages[0]['content']}{CLOSE}"
    if rng.random() < 0.5:
        told = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
        return [*messages, *told], answer
    guess = rng.random() < (0.1 if progress <= 0.8 else 0.8)
    return messages, str(rng.randint(100, 9801)) if guess else call


def make_model(path: Path, seed: int) -> None:
    """Write a fresh model of 0.1 million parameters and its tokenizer, digits and a few marks, into `path`."""
    import re

    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<unk>"))
    longest = "|".join(re.escape(piece) for piece in (OPEN, CLOSE))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(f"{longest}|."), "isolated")
    pieces.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers types its own only in part
        tokenizer_object=pieces,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(MARKS[3:]),
        padding_side="left",
        chat_template=TEMPLATE,
    )
    config = Qwen3Config(
        vocab_size=len(PIECES),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
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
    tokenizer.save_pretrained(path)
