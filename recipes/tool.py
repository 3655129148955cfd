"""Tool use: multiply two numbers of two digits, which a tiny model cannot do in its head, and a calculator can.

The model may call the calculator in the common format and is told what it answers, or say a product at once. It is
taught to call, to copy, and mostly to guess. What is left to learn by reinforcement is to call: the reward rises from
about 0.2 to above 0.9.
"""

from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny import write_with_tokenizer

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

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pieces = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<unk>"))
    longest = "|".join(re.escape(piece) for piece in (OPEN, CLOSE))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(f"{longest}|."), "isolated")
    pieces.decoder = decoders.Fuse()
    write_with_tokenizer(
        path, seed, pieces, PIECES, positions=64, additional_special_tokens=list(MARKS[3:]), chat_template=TEMPLATE
    )
