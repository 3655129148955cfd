"""A recipe: everything that a run is told, in one YAML file with command-line overrides.

Each section is the config of the actor that it tells, and sits beside it; here they are put together, checked against
each other, and every mistake becomes one sentence that names the file, the key, the value and what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from actors.controller.config import ControllerConfig
from actors.episode.config import EpisodeConfig
from actors.evaluator.config import EvaluationConfig
from actors.reward.config import RewardConfig
from actors.rollout.config import RolloutConfig
from actors.trainer.config import SftConfig, TrainerConfig
from actors.trainer.presets import CONTROLLER, chosen_anew
from ops.datasets import DataConfig, fitting_reward, names_files, split_of
from ops.metrics.config import MetricsConfig
from ops.models import ModelConfig
from schemas import Config, UserError

T = TypeVar("T", bound=BaseModel)

DATA_KEYS = ("data.train", "data.eval")
ALGORITHM = "trainer.algorithm"
NAME_CHARS_MAX = 47  # a run is named <name>-<yyyymmdd>-<hhmmss>, and a run name has at most 63 characters


class SftSection(SftConfig):
    """The warm start. `examples` names the function that draws demonstrations."""

    examples: str = Field(min_length=1, description="package.module:function or file.py:function")


def _joined(servers: Any) -> Any:
    """Servers as a YAML list are one URL with commas."""
    return ",".join(servers) if isinstance(servers, list) and all(isinstance(s, str) for s in servers) else servers


class BusConfig(Config):
    """The message log."""

    url: Annotated[str | None, BeforeValidator(_joined)] = Field(
        None,
        description="an existing NATS server, or a list of those of a cluster; without it one is started",
    )
    replicas: Literal[1, 3, 5] = Field(1, description="servers of the cluster that keep each message; 3 survive one")
    ack_wait_s: float = Field(6.0, gt=0, le=3600, description="silence after which a worker's samples go to another")
    weights: Literal["directory", "both"] = Field(
        "directory",
        description="where new weights go: the run's folder, or that and the server, for workers that do not see it",
    )


class Recipe(Config):
    """A run, resolved. `base` is the recipe file's folder: function files and data paths are relative to it."""

    name: str = Field(pattern=rf"^[a-z0-9][a-z0-9-]{{0,{NAME_CHARS_MAX - 1}}}$")
    seed: int = Field(0, ge=0, lt=1 << 31)
    steps: int = Field(ge=1, le=1_000_000)
    model: ModelConfig
    sft: SftSection | None = None
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    controller: ControllerConfig = ControllerConfig()
    rollout: RolloutConfig = RolloutConfig()
    episode: EpisodeConfig | None = None
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    bus: BusConfig = BusConfig()
    processes: Literal["shared", "separate"] = "shared"
    hung_after_s: float = Field(20.0, ge=0, le=3600)
    """Silence of a process, in seconds, after which it is killed and started again; 0 never does."""
    base: Path = Path()

    @property
    def batch_samples(self) -> int:
        """Samples in a training batch."""
        return self.controller.batch_groups * self.controller.group_size

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, fields: Any) -> Any:
        """The seed of a section that names none is the run's."""
        if not isinstance(fields, dict):
            return fields
        sections = {name: fields.get(name) for name in ("sft", "trainer")}
        seeded = {
            name: {"seed": fields.get("seed", 0)} | section
            for name, section in sections.items()
            if isinstance(section, dict)
        }
        return {"trainer": {"seed": fields.get("seed", 0)}} | fields | seeded

    @model_validator(mode="before")
    @classmethod
    def _algorithm(cls, fields: Any) -> Any:
        """What an algorithm asks of the controller, unless the recipe says it itself."""
        if not isinstance(fields, dict) or not isinstance(fields.get("trainer"), dict):
            return fields
        asked = CONTROLLER.get(str(fields["trainer"].get("algorithm")), {})
        controller = fields.get("controller", {})
        return fields | {"controller": asked | controller} if asked and isinstance(controller, dict) else fields

    @model_validator(mode="before")
    @classmethod
    def _reward_of_the_data(cls, fields: Any) -> Any:
        """A recipe that names the shape of its rows but no reward function gets the one that fits them."""
        if not isinstance(fields, dict) or not isinstance(fields.get("data"), dict):
            return fields
        reward = fields.get("reward", {})
        fitting = fitting_reward(fields["data"])
        return fields | {"reward": {"function": fitting} | reward} if fitting and isinstance(reward, dict) else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self

    def to_yaml(self) -> str:
        """The whole recipe with all defaults filled in; `from_yaml` reads it back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def to_log(self) -> str:
        """As `to_yaml`, for the log, which is recorded and passed on: without the server's address and its password."""
        return self.model_copy(update={"bus": self.bus.model_copy(update={"url": None})}).to_yaml()

    @classmethod
    def from_yaml(cls, text: str, source: str = "the recipe on the bus") -> Self:
        """The recipe in `text`. Raises `UserError`."""
        return _validated(cls, _parsed(text, source), source, {})

    def changed(self, overrides: Sequence[str], source: str) -> Self:
        """This recipe with overrides such as `trainer.lr=1e-4`, whose values are YAML. Raises `UserError`."""
        fields = self.model_dump(mode="json")
        return _validated(type(self), fields, source, _overridden(fields, overrides))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides such as `trainer.lr=1e-4`, whose values are YAML.

    Raises:
        UserError: what is wrong, in which file, at which key, and what would be right.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no recipe {path}.", _near_files(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The recipe {path} cannot be read: {error}.", "Name a YAML file.") from None
    source = str(path)
    fields = _parsed(text, source)
    overridden = _overridden(fields, overrides)
    if "base" in fields:
        raise UserError(f"{source}: the key base is set by Rollstream to the recipe's folder.", "Remove it.")
    fields["base"] = str(path.resolve().parent)
    recipe = _validated(Recipe, fields, source, overridden)
    for key, named in _leaves(recipe.model_dump()):
        if isinstance(named, str) and ".py:" in named:
            _check_file(recipe.base, source, key, named)
        elif isinstance(named, str) and key in DATA_KEYS and names_files(named):
            _check_file(recipe.base, source, key, split_of(named)[0])
    return recipe


# ---- reading


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key} occurs twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        fields = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise UserError(f"{where}: {getattr(error, 'problem', None) or error}.", "Mend the YAML.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{source} holds no recipe.", "Begin with `rollstream init`, which writes a commented one.")
    return fields


def _overridden(fields: dict[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Put overrides into the fields; returns them by key."""
    read = [(*_override(override), override) for override in overrides]
    for key, value, _ in read:
        if key == ALGORITHM:  # the last word: it replaces the finer keys, and those beside it refine it
            fields.update(chosen_anew(fields, value))
    for key, value, _ in read:
        _put(fields, key, value)
    return {key: override for key, _, override in read}


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r} is no override.", "Write key=value, for instance trainer.lr=1e-4 or steps=20.")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"The value of {text!r} is not YAML.", f"Quote it: {key}='\"...\"'.") from None


def _put(fields: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    at = fields
    for name in sections:
        inner = at.get(name)
        if inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            raise UserError(f"The override {key} reaches into {name}, which holds {inner!r}.", "Correct the key.")
        at[name] = dict(inner)
        at = at[name]
    at[last] = value


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_file(base: Path, source: str, key: str, named: str) -> None:
    """That a file is there is known at once; the function in it is looked for when it is imported."""
    file = base / Path(named.partition(".py:")[0] + ".py" if ".py:" in named else named).expanduser()
    if not file.is_file() and not (key in DATA_KEYS and file.is_dir()):
        raise UserError(f"{source}: {key} names {named}, but there is no file {file}.", _near_files(file))


def _near_files(path: Path) -> str:
    folder = path.parent
    others = sorted(p.name for p in folder.glob(f"*{path.suffix}")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, others, n=1)
    if near:
        return f"Did you mean {folder / near[0]}?"
    return "Correct the path." if folder.is_dir() else f"There is no folder {folder} either."


# ---- saying what is wrong


def _validated(cls: type[T], fields: dict[str, Any], source: str, overridden: Mapping[str, str]) -> T:
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        found = error.errors()
        first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
        message, remedy = _sentence(cls, first)
        key = _dotted(first)
        where = f"{source}, changed by {overridden[key]!r} on the command line" if key in overridden else source
        more = f" ({len(found) - 1} more to mend after it.)" if len(found) > 1 else ""
        raise UserError(f"{where}: {message}.", remedy + more) from None


def _dotted(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"])


def _sentence(cls: type[BaseModel], error: ErrorDetails) -> tuple[str, str]:
    """What is wrong with a value and what would be right, from pydantic's account of it."""
    key, value, limits = _dotted(error), error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return f"there is no key {key}", _near_keys(cls, error["loc"])
        case "missing" if isinstance(error["loc"][-1], int):
            return f"{key.rpartition('.')[0]} is {_brief(value)}", "It has too few items."
        case "missing":
            return f"the key {key} is missing", "Add it; `rollstream init` writes a recipe with all keys explained."
        case "value_error":
            reason, _, remedy = str(limits["error"]).partition(" => ")
            return (f"{key}: {reason}" if key else reason), remedy or "Change one of them."
        case "literal_error" | "enum":
            near = difflib.get_close_matches(str(value), [w.strip("',") for w in str(limits["expected"]).split()], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            return f"{key} is {_brief(value)}", f"It must be {limits['expected']}.{hint}"
        case "string_pattern_mismatch" if key == "name":
            allowed = f"lower-case letters, digits and '-', at most {NAME_CHARS_MAX}, the first not a '-'"
            return f"name is {_brief(value)}", f"It must consist of {allowed}."
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"{key} is {_brief(value)}", "It must be a section with keys of its own."
        case "tuple_type" | "list_type":
            return f"{key} is {_brief(value)}", "It must be a list, such as [a, b]."
        case "too_long":
            return f"{key} is {_brief(value)}", f"It may hold {limits['max_length']} at most."
        case "too_short":
            return f"{key} is {_brief(value)}", f"It must hold {limits['min_length']} at least."
    said = error["msg"].removeprefix("Input should be ").removeprefix("Value should ").partition(", unable to")[0]
    return f"{key} is {_brief(value)}", f"It must be {said}."


def _near_keys(cls: type[BaseModel], loc: Sequence[int | str]) -> str:
    key = ".".join(map(str, loc))
    keys = list(_keys(cls))
    beside = [name for name in keys if name.rpartition(".")[0] == key.rpartition(".")[0]]
    by_last = {name.rpartition(".")[2]: name for name in keys}
    last = str(loc[-1])
    near = difflib.get_close_matches(key, beside, n=1, cutoff=0.7)
    near = near or ([by_last[last]] if last in by_last else [])
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1)]
    if near:
        return f"Did you mean {near[0]}?"
    section = key.rpartition(".")[0]
    names = ", ".join(name.rpartition(".")[2] for name in beside)
    return f"The keys {f'of {section} ' if section else ''}are {names}."


def _keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys of a config, dotted."""
    for name, field in cls.model_fields.items():
        if name == "base":
            continue
        yield f"{prefix}{name}"
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


# ---- what cannot be right


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Settings that contradict each other, as `reason => remedy`."""
    controller, rollout, trainer = recipe.controller, recipe.rollout, recipe.trainer
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"rollout.top_p {rollout.top_p} and rollout.top_k {rollout.top_k} truncate the sampled distribution, and "
            "the trainer would weigh it against the whole one: a silent bias "
            "=> Train with top_p: 1 and top_k: 0; lower rollout.temperature for less variety."
        )
    grouped = {trainer.advantage.mean, trainer.advantage.std} & {"group"} and trainer.advantage.function is None
    if controller.group_size == 1 and (grouped or trainer.advantage.leave_one_out):
        yield (
            "controller.group_size 1 with advantages compared within the group: a group of one has nothing to compare "
            "with, and every advantage would be 0 "
            "=> Set controller.group_size to 2 or more, or trainer.advantage.mean and .std to batch or none."
        )
    if controller.group_size == 1 and controller.filter == "zero_variance":
        yield (
            "controller.group_size 1 with controller.filter zero_variance: one sample has no variance, so every group "
            "would be dropped and no batch would ever fill "
            "=> Set controller.group_size to 2 or more, or controller.filter to none."
        )
    if trainer.minibatches > recipe.batch_samples:
        yield (
            f"trainer.minibatches {trainer.minibatches} of a batch of {recipe.batch_samples} samples: some would be "
            "empty => Lower trainer.minibatches."
        )
    if recipe.evaluation.count and recipe.data.eval is None and names_files(recipe.data.train):
        yield (
            f"evaluation.count {recipe.evaluation.count} without data.eval: it would be done on the rows of "
            f"{recipe.data.train}, which are trained on "
            "=> Name held-out rows in data.eval, or set evaluation.count to 0."
        )
    episode = recipe.episode
    if recipe.evaluation.count and episode is not None and episode.has_agent:
        yield (
            f"evaluation.count {recipe.evaluation.count} beside the {episode.what}: an agent asks over HTTP, and "
            "held-out problems cannot be asked through it; without it the score would be of something else than what "
            "is trained => Set evaluation.count to 0; the reward of the training batches tells how it learns."
        )
