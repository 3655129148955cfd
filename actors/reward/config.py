"""The recipe's `reward` section."""

from typing import Any, Self

from pydantic import Field, model_validator

from schemas.config import Config
from schemas.errors import UserError


class RewardConfig(Config):
    """How finished samples are scored.

    `function` is the name of a built-in function (`actors.reward.verifiers`), or a function of the user's, written
    `package.module:function` or `path/to/file.py:function` (relative to the recipe's folder).
    """

    function: str = Field(default="exact", min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    """What the function is told beside the sample: the options of a built-in function, or keyword arguments."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Most seconds one call may take, counted from the call's own start: starting a process does not count."""
    start_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Most seconds a reward process may take to start and import the function."""
    retries: int = Field(default=1, ge=0, le=10)
    """Further attempts after a timeout or an error."""
    children: int = Field(default=2, ge=1, le=256)
    """Most reward processes of one worker; each is started when first needed."""
    workers: int = Field(default=1, ge=1, le=256)
    """Reward workers, each a subscriber of its own with its own processes."""

    @model_validator(mode="after")
    def _built_in_options(self) -> Self:
        """A function of the user's is asked in its process; a wrong name is told there, too."""
        if ":" in self.function or not self.model_fields_set:
            return self
        from actors.reward.verifiers import BUILTINS, check_options
        from actors.reward.verifiers.options import as_reason

        if self.function in BUILTINS:
            try:
                check_options(self.function, self.options)
            except UserError as error:
                raise ValueError(as_reason(error)) from None
        return self
