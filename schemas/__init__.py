"""Messages on the wire. Imports nothing of ours, no torch, no nats.

Names are loaded when first used: a reward process needs `UserError` only, and starts in a quarter of the time without
numpy and pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schemas.codec import PAYLOAD_BYTES_MAX as PAYLOAD_BYTES_MAX
    from schemas.codec import decode as decode
    from schemas.codec import encode as encode
    from schemas.config import Config as Config
    from schemas.errors import MalformedMessage as MalformedMessage
    from schemas.errors import UserError as UserError
    from schemas.fields import Segments as Segments
    from schemas.ids import oldest_and_newest as oldest_and_newest
    from schemas.ids import parse_sample_id as parse_sample_id
    from schemas.ids import sample_id as sample_id
    from schemas.messages import Batch as Batch
    from schemas.messages import Control as Control
    from schemas.messages import Dropped as Dropped
    from schemas.messages import DropReason as DropReason
    from schemas.messages import Evaluation as Evaluation
    from schemas.messages import Finish as Finish
    from schemas.messages import Message as Message
    from schemas.messages import Partial as Partial
    from schemas.messages import Prompt as Prompt
    from schemas.messages import Rollout as Rollout
    from schemas.messages import Scored as Scored
    from schemas.messages import StepDone as StepDone
    from schemas.messages import Verdict as Verdict
    from schemas.messages import WeightVersion as WeightVersion
    from schemas.turns import Answer as Answer
    from schemas.turns import Note as Note
    from schemas.turns import Turn as Turn

_HOMES = {
    "schemas.errors": ("MalformedMessage", "UserError"),
    "schemas.config": ("Config",),
    "schemas.fields": ("Segments",),
    "schemas.codec": ("PAYLOAD_BYTES_MAX", "decode", "encode"),
    "schemas.messages": (
        "Batch", "Control", "Dropped", "DropReason", "Evaluation", "Finish", "Message", "Partial", "Prompt", "Rollout",
        "Scored", "StepDone", "Verdict", "WeightVersion",
    ),
    "schemas.turns": ("Answer", "Note", "Turn"),
    "schemas.ids": ("oldest_and_newest", "parse_sample_id", "sample_id"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
