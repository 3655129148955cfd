"""The base of every config: frozen, strict about unknown keys, without defaults that surprise."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen section of a recipe. Unknown keys and values out of bounds raise `pydantic.ValidationError`.

    Each actor's config sits beside the actor that it configures; `ops.recipe` puts the sections together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
