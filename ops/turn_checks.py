"""What an audit holds the turns of episodes to: rollouts are made of answers that stand in the log, of nothing else.

Fed by `ops.invariants.Auditor` in its order: turns, then answers, then rollouts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from bus.port import Entry
from ops.findings import Check
from ops.raw_entries import fields_of
from schemas import Segments

ITEM_BYTES: Final = 4  # of a token, and of a logprob


class TurnChecks:
    """Remembers a digest of each answer. Findings go to the checks `tags` (I5) and `log`, counts to `totals`."""

    def __init__(
        self, tags: Check, log: Check, totals: Counter[str], admitted: Callable[[tuple[int, int]], bool]
    ) -> None:
        self._tags = tags
        self._log = log
        self._totals = totals
        self._admitted = admitted
        self._asked: dict[str, int] = {}  # turn id -> the version asked for
        self._answers: dict[str, list[tuple[int, bytes]]] = {}  # turn id -> tokens and digest, of each that came

    def turn(self, entry: Entry) -> None:
        """Take a turn."""
        fields = fields_of(entry)
        sample = fields["group_id"], fields["index"]
        self._log.checked += 1
        if not self._admitted(sample):
            self._log.fail(f"turns {entry.seq} is of sample {sample[0]}-{sample[1]}, which was never admitted")
        if entry.id in self._asked:
            self._totals["duplicates"] += 1
        self._asked[entry.id] = fields["min_version"]
        self._totals["turns"] += 1

    def note(self, entry: Entry) -> None:
        """Take what an agent did in its session."""
        fields = fields_of(entry)
        sample = fields["group_id"], fields["index"]
        self._log.checked += 1
        if not self._admitted(sample):
            self._log.fail(f"notes {entry.seq} is of sample {sample[0]}-{sample[1]}, which was never admitted")
        self._totals["notes"] += 1

    def answer(self, entry: Entry, fields: dict[str, Any], segments: Segments) -> None:
        """Take an answer, whose tags were found sound."""
        name = entry.id
        self._log.checked += 1
        if fields["turn"] != name:
            self._log.fail(f"answers {entry.seq} is to {fields['turn']} and has the id {name!r}")
        asked = self._asked.get(name)
        if asked is None:
            self._log.fail(f"answers {entry.seq} is to the turn {name}, which was never asked")
        elif segments and min(segments)[0] < asked:
            self._tags.fail(f"{name} has tokens of version {min(segments)[0]}, its turn asks for {asked}")
        known = self._answers.setdefault(name, [])
        if known:
            self._totals["duplicates"] += 1
        tokens = len(fields["tokens"]) // ITEM_BYTES
        known.append((tokens, _digest(fields["tokens"], fields["logprobs"], _versions(segments).tobytes())))
        self._totals["answers"] += 1

    def rollout(self, entry: Entry, fields: dict[str, Any], segments: Segments) -> None:
        """Check that what the model made in a rollout is what its answers hold: tokens, logprobs and versions."""
        names: Sequence[str] = fields.get("turns") or ()
        if not names:
            return
        made = np.ones(len(fields["tokens"]) // ITEM_BYTES, np.bool_)
        spans = np.frombuffer(fields.get("observations") or b"", "<i4").reshape(-1, 2)
        for start, count in spans.tolist():
            made[start : start + count] = False
        columns = [
            np.frombuffer(fields["tokens"], "<i4")[made],
            np.frombuffer(fields["logprobs"], "<f4")[made],
            _versions(segments)[made],
        ]
        at = 0
        for name in names:
            self._tags.checked += 1
            tokens = self._taken(name, at, columns)
            if tokens is None:
                what = "differs from the answer" if name in self._answers else "has no answer"
                self._tags.fail(f"{entry.id} at rollouts {entry.seq}: what is of turn {name} {what} in the log")
                return
            at += tokens
        if at != len(columns[0]):
            self._tags.fail(
                f"{entry.id} at rollouts {entry.seq} has {len(columns[0])} tokens of the model's, its turns {at}"
            )

    def _taken(self, name: str, at: int, columns: Sequence[np.ndarray[Any, Any]]) -> int | None:
        """How many tokens from `at` on are the answer `name`; None if they are not."""
        for tokens, digest in self._answers.get(name, ()):
            parts = [column[at : at + tokens].tobytes() for column in columns]
            if at + tokens <= len(columns[0]) and _digest(*parts) == digest:
                return tokens
        return None


def _versions(segments: Segments) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The version of each token, int32 [T]."""
    pairs = np.array(segments, "<i4").reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1])


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
