"""What an audit holds the turns of episodes to: rollouts are made of answers that stand in the log and of what was told
between them, which is told as such and never trained.

Fed by `ops.invariants.Auditor` in its order: turns, then answers, then rollouts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from bus.port import Entry
from ops.findings import Check
from ops.raw_entries import fields_of
from schemas import MalformedMessage, Segments
from schemas.fields import IntArray
from schemas.trajectory import Mask, check_observations, check_sequences, model_tokens

ITEM_BYTES: Final = 4  # of a token, and of a logprob


class TurnChecks:
    """Remembers a digest of each answer. Findings go to the checks I5, `turns` and `log`, counts to `totals`."""

    def __init__(
        self, checks: Mapping[str, Check], totals: Counter[str], admitted: Callable[[tuple[int, int]], bool]
    ) -> None:
        self._tags, self._told, self._log = checks["I5"], checks["turns"], checks["log"]
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

    def rollout(self, entry: Entry, fields: dict[str, Any], segments: Segments) -> IntArray:
        """Check that what the model made in a rollout is what its answers hold: tokens, logprobs and versions.

        Returns its observations, none if they cannot be.
        """
        names: Sequence[str] = fields.get("turns") or ()
        spans, sequences = (np.frombuffer(fields.get(name) or b"", "<i4") for name in ("observations", "sequences"))
        versions, none = _versions(segments), np.zeros(0, "<i4")
        total = len(fields["tokens"]) // ITEM_BYTES
        if not (names or len(spans) or len(sequences)) or len(versions) != total:
            return none
        self._told.checked += 1
        try:
            check_observations(spans, np.frombuffer(fields["logprobs"], "<f4"))
            check_sequences(sequences, len(fields["prompt_tokens"]) // ITEM_BYTES, total)
        except MalformedMessage as error:
            self._told.fail(f"{entry.id} at rollouts {entry.seq}: {error}")
            return none
        self._totals["observed tokens"] += int(spans[1::2].sum())
        if names:
            self._made_of(entry, fields, versions, model_tokens(spans, total), names)
        return spans

    def _made_of(
        self, entry: Entry, fields: dict[str, Any], versions: IntArray, made: Mask, names: Sequence[str]
    ) -> None:
        columns = [
            np.frombuffer(fields["tokens"], "<i4")[made],
            np.frombuffer(fields["logprobs"], "<f4")[made],
            versions[made],
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

    def trained(self, step: int, tokens: int, allowed: int) -> None:
        """Check a step's trained tokens against those that the model made and that are young enough for it."""
        self._told.checked += 1
        if tokens > allowed:
            self._told.fail(f"step {step} trained {tokens} tokens; the model made {allowed} that are young enough")

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
