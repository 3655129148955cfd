"""The base of every config: frozen, strict about unknown keys, without defaults that surprise."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen section of a recipe. Unknown keys, values out of bounds and numbers that are not finite raise
    `pydantic.ValidationError`.

    Each actor's config sits beside the actor that it configures; `ops.recipe` puts the sections together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
