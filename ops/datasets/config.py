"""The recipe's `data` section."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from schemas import Config

FormatName = Literal["auto", "rows", "gsm8k", "math", "choice", "apps", "taco", "livecodebench", "deepcoder"]
FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
PROMPT_MARK = "{prompt}"
GYM = "reasoning_gym:"
_TEMPLATE_ARGUMENTS = {"add_generation_prompt", "return_dict", "tokenize", "return_tensors", "conversation"}


def split_of(spec: str) -> tuple[str, str | None]:
    """`folder#test` as the folder and the split that it names, None without one."""
    path, mark, split = spec.partition("#")
    return path, split if mark else None


def names_files(spec: str) -> bool:
    """Whether `spec` is a file or a folder rather than a function or a task that makes rows."""
    return split_of(spec)[0].endswith(FILE_ENDINGS) or ":" not in spec


class DataConfig(Config):
    """Where prompts come from, how their rows are read, and what becomes of bad ones.

    `train` and `eval` are each a file (JSONL, also .gz and .zst; Parquet; Arrow) or a Hugging Face folder (`folder`, or
    `folder#split`), relative to the recipe's folder; a function `path/to/file.py:function` or `package.module:function`
    that makes a row from a `random.Random`; or `reasoning_gym:task`. If `eval` is left out, the training data serves
    for evaluation: what makes rows with draws that training never makes, a file as it is.
    """

    train: str = Field(min_length=1)
    eval: str | None = None
    shuffle: bool = True
    """Whether a training file is read in a new order in each epoch. Evaluation files are read as they are."""
    format: FormatName = "auto"
    """The shape of the rows; `auto` looks at the first row of each file."""
    columns: dict[str, str] | None = None
    """Our names for the file's columns, as `{prompt: problem, answer: target}`; all others are left out."""
    template: str | None = None
    """Text around each prompt, with `{prompt}` where it goes."""
    system: str | None = Field(default=None, min_length=1)
    """A system message before each prompt; makes a text prompt a chat."""
    chat: bool = False
    """Whether a text prompt is put to the model as a user's message, by its chat template."""
    chat_template: str | None = Field(default=None, min_length=1)
    """A file with a Jinja template to use in place of the tokenizer's own."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, as `{enable_thinking: false}`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a reasoning-gym task."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """A longer prompt, with its chat template, is a bad row."""
    tests_bytes_max: int = Field(default=131_072, ge=1, le=4_000_000)
    """Of a row's tests so many bytes are kept, the first that fit: they travel with every sample."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    bad_rows_max: float = Field(default=0.05, ge=0, lt=1)
    """The share of a file's rows that `skip` may skip; more stop the run."""
    on_duplicate: Literal["keep", "skip", "stop"] = "keep"
    """What becomes of a row that equals an earlier one of its file."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.template is not None and PROMPT_MARK not in self.template:
            raise ValueError("template has no {prompt} => Write {prompt} where the row's prompt goes.")
        if taken := _TEMPLATE_ARGUMENTS & set(self.template_options):
            raise ValueError(f"template_options sets {', '.join(sorted(taken))} => Leave that to Rollstream.")
        if self.columns is not None and not self.columns:
            raise ValueError("columns is empty => Name at least the prompt's, as {prompt: question}.")
        if self.options and not any(str(spec).startswith(GYM) for spec in (self.train, self.eval)):
            raise ValueError(f"options are for {GYM}TASK, which neither train nor eval is => Remove them.")
        return self
