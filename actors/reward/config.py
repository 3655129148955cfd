"""The recipe's `reward` section."""

from pydantic import Field

from schemas.config import Config


class RewardConfig(Config):
    """How finished samples are scored.

    `function` is one of the built-in names `exact`, `numeric`, `math_verify`, or a function of the user's, written
    `package.module:function` or `path/to/file.py:function` (relative to the recipe's folder).
    """

    function: str = Field(default="exact", min_length=1)
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
