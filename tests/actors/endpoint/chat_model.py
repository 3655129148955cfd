"""A tokenizer of bytes with the marks and the template of common chat models, and a policy that says what it is to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas import Answer

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tokenizer(path: Path) -> None:
    """Write the tokenizer of 256 bytes and three marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)


def answer_of(tokens: Sequence[int], finish: Any = "stop", version: int = 0, stopped: str = "") -> Answer:
    return Answer(
        group_id=0,
        index=0,
        turn="0-0/0-0-0/x",
        tokens=np.array(tokens, "<i4"),
        logprobs=np.array([-(1 + token % 7) / 8 for token in tokens], "<f4"),
        segments=((version, len(tokens)),) if len(tokens) else (),
        finish=finish,
        text="",
        stopped=stopped,
    )


class FakePolicy:
    """Answers by `say(prompt text, number)`, a text or its tokens, token by token with `pause_s` between them."""

    def __init__(self, tokenizer: Any, say: Callable[[str, int], Any], pause_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.say = say
        self.pause_s = pause_s
        self.hold: asyncio.Event | None = None
        self.skipped = 0
        self.asked: list[tuple[int, ...]] = []
        self.contexts: list[dict[str, Any]] = []
        self.answers: list[list[Answer]] = []

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        n: int = 1,
        on_tokens: Any = None,
        context: dict[str, Any] | None = None,
    ) -> list[Answer]:
        self.asked.append(tuple(prompt_tokens))
        self.contexts.append(context or {})
        answers = [self._answer(prompt_tokens, max_new_tokens, stop, choice) for choice in range(n)]
        self.answers.append(answers)
        for i in range(max(len(answer.tokens) for answer in answers)):
            await asyncio.sleep(self.pause_s)
            if self.hold is not None:
                await self.hold.wait()
            for choice, answer in enumerate(answers):
                if on_tokens is not None and i < len(answer.tokens):
                    on_tokens(choice, i, (int(answer.tokens[i]),), (float(answer.logprobs[i]),))
        return answers

    def skip(self) -> None:
        self.skipped += 1

    def _answer(self, prompt_tokens: Sequence[int], most: int | None, stop: Sequence[str], choice: int) -> Answer:
        said = self.say(self.tokenizer.text_of(prompt_tokens), choice)
        if isinstance(said, Answer):
            return said
        tokens = list(self.tokenizer.encode(said)) if isinstance(said, str) else list(said)
        if most is not None and len(tokens) > most:
            return answer_of(tokens[:most], "length")
        for end in range(1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[:end])
            for mark in stop:
                if mark in text:
                    return answer_of(tokens[:end], "stop", stopped=mark)
        return answer_of([*tokens, self.tokenizer.eos_token_id])
