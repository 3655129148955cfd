"""Messages on the wire. Imports nothing of ours, no torch, no nats."""

from schemas.codec import PAYLOAD_BYTES_MAX, decode, encode
from schemas.config import Config
from schemas.errors import MalformedMessage, UserError
from schemas.fields import Segments
from schemas.messages import (
    Batch,
    Control,
    Dropped,
    DropReason,
    Finish,
    Message,
    Partial,
    Prompt,
    Rollout,
    Scored,
    StepDone,
    Verdict,
    WeightVersion,
    oldest_and_newest,
    parse_sample_id,
    sample_id,
)

__all__ = [
    "PAYLOAD_BYTES_MAX", "Batch", "Config", "Control", "DropReason", "Dropped", "Finish", "MalformedMessage", "Message",
    "Partial", "Prompt", "Rollout", "Scored", "Segments", "StepDone", "UserError", "Verdict", "WeightVersion", "decode",
    "encode", "oldest_and_newest", "parse_sample_id", "sample_id",
]  # fmt: skip
