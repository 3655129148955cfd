"""Between text and tokens, by the model's own tokenizer."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas import UserError

if TYPE_CHECKING:
    from ops.datasets import DataConfig


OPEN, CLOSE = "\ue000", "\ue001"  # around a special token that is told as text; for private use, so no text has them


class HfTokenizer:
    """A Hugging Face tokenizer as a rollout worker needs it."""

    def __init__(
        self, path: str, template_options: Mapping[str, Any] | None = None, template: str | None = None
    ) -> None:
        """`template_options` go to the chat template; `template` is one to use in place of the tokenizer's own."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._path = path
        self._template_options = dict(template_options or {})
        if template is not None:
            self._tokenizer.chat_template = template
        marks = {str(token.content) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        any_mark = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)"
        self._mark = re.compile(any_mark)
        self._told_mark = re.compile(f"{OPEN}({any_mark}){CLOSE}")

    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a text as it stands, or of chat messages by the model's chat template, ready for the answer.

        Raises `UserError` if there are chat messages and the tokenizer has no template for them, or it refuses them.
        """
        if isinstance(prompt, str):
            return tuple(self._tokenizer(prompt)["input_ids"])
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"The data holds chat messages, but the tokenizer of {self._path} has no chat template.",
                "Use a chat model, name a template in data.chat_template, or let the data's `prompt` be text: "
                "data.chat false, no data.system.",
            )
        try:
            tokens = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False, **self._template_options
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise self._failed(error) from error
        return tuple(tokens)

    def count(self, prompt: Any) -> int:
        """Tokens of a prompt, as `encode_prompt` gives them."""
        return len(self.encode_prompt(prompt))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be encoded."""
        return self._tokenizer.chat_template is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> str:
        """Chat messages as text by the model's chat template, ready for the answer; `tools` in OpenAI's format.

        `options` go to the template, over those of the data. What a tool answered, a message of the role `tool`, is
        marked so that `encode` takes special tokens in it for text: a web page must not end its turn and begin another.

        Raises `UserError` if there is no template, or it refuses them.
        """
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"An episode holds a chat, but the tokenizer of {self._path} has no chat template.",
                "Use a chat model, name a template in data.chat_template, or let the data's `prompt` be text.",
            )
        conversation: Any = [self._harmless(message) for message in messages]
        told: Any = list(tools) or None
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=told,
                add_generation_prompt=True,
                tokenize=False,
                **(self._template_options | options),
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise self._failed(error) from error
        return str(text)

    def _failed(self, error: Exception) -> UserError:
        return UserError(
            f"The chat template of {self._path} fails: {' '.join(str(error).split())}.",
            "Correct the messages, data.template_options or data.chat_template.",
        )

    def spelling(self, token: int) -> str:
        """A token as text; special ones too."""
        return self._decoded([token])

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a bare text; no special token is added, those that stand in it are taken as such.

        Those that a tool told are text: see `quoted` and `render`.
        """
        if OPEN not in text:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens: list[int] = []
        for i, piece in enumerate(self._told_mark.split(text)):
            as_text = {"split_special_tokens": True} if i % 2 else {}
            tokens += self._tokenizer(piece, add_special_tokens=False, **as_text)["input_ids"] if piece else ()
        return tuple(tokens)

    def quoted(self, text: str) -> str:
        """A text whose special tokens `encode` takes for text."""
        return self._mark.sub(lambda mark: f"{OPEN}{mark[0]}{CLOSE}", text)

    def _harmless(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, str):
            return message
        return {**message, "content": self.quoted(content)}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included: what the model sees."""
        return self._decoded(tokens)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds where it stands; joined they are the decoded text, special tokens included.

        Of the tokens that share a character all but the last are empty; a character that never ends is `\ufffd`.
        """
        pieces: list[str] = []
        told, known = 0, 0  # decoded from `told` on, since a word's beginning shows only behind another word
        for end in range(1, len(tokens) + 1):
            text = self._decoded(tokens[told:end])
            if text.endswith("\ufffd") and end < len(tokens):
                pieces.append("")
                continue
            pieces.append(text[len(self._decoded(tokens[told:known])) :])
            told, known = known, end
        return pieces

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False)) if len(tokens) else ""

    def stop_token_ids(self, stop: Sequence[str], model_eos: int | Sequence[int] | None) -> tuple[int, ...]:
        """Ids that end an answer: the model's and the tokenizer's end of sequence, and the tokens named in `stop`.

        Raises `UserError` if a name is no single token.
        """
        ids = set() if model_eos is None else {model_eos} if isinstance(model_eos, int) else set(model_eos)
        if self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        vocabulary = self._tokenizer.get_vocab()
        for name in stop:
            if name not in vocabulary:
                raise UserError(
                    f"rollout.stop names {name!r}, which is no token of {self._path}.", "Name whole tokens."
                )
            ids.add(vocabulary[name])
        return tuple(sorted(ids))

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside a model."""
        self._tokenizer.save_pretrained(folder)

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer. Raises `UserError` if there is none."""
        if self._tokenizer.eos_token_id is None:
            raise UserError(f"The tokenizer of {self._path} has no end-of-sequence token.", "Set its eos_token.")
        return int(self._tokenizer.eos_token_id)


def prompt_counter(data: DataConfig, folder: Callable[[], Path]) -> Callable[[Any], int] | None:
    """What counts a prompt's tokens with the tokenizer in a folder, if the recipe bounds them."""
    if data.max_prompt_tokens is None:
        return None
    return HfTokenizer(str(folder()), data.template_options).count


def decoder_of(folder: Callable[[], Path]) -> Callable[[], Callable[[Sequence[int]], str]]:
    """Gives, once it is asked for, `HfTokenizer.decode` of the model in a folder; from any thread, loaded once."""
    lock = threading.Lock()  # transformers cannot be imported by two threads at once
    loaded: list[HfTokenizer] = []

    def decoder() -> Callable[[Sequence[int]], str]:
        with lock:
            if not loaded:
                loaded.append(HfTokenizer(str(folder())))
            return loaded[0].decode

    return decoder


def visible(text: str) -> str:
    """Text on one line, in which line ends, tabs, control characters and blanks that stand alone can be seen."""
    if text.strip(" ") == "":
        return "·" * len(text)
    marks = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(marks.get(char, char if char.isprintable() else f"\\x{ord(char):02x}") for char in text)
