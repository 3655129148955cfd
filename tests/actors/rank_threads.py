"""Ranks that are threads of one process: as many as a test likes, without the seconds that processes take to start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from actors.trainer.ranks import split
from actors.trainer.samples import TrainSample

T = TypeVar("T")
WAIT_S = 60.0


class _Meeting:
    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=WAIT_S)
        self.given: list[object] = [None] * count


class ThreadRanks:
    """One rank, in a thread of its own; see `actors.trainer.ranks.Ranks`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.count = meeting.count
        self._meeting = meeting

    def _all(self, own: object) -> list[object]:
        self._meeting.given[self.rank] = own
        self._meeting.barrier.wait()
        told = list(self._meeting.given)
        self._meeting.barrier.wait()
        return told

    def gather(self, own: bytes) -> list[bytes]:
        return [bytes(each) for each in self._all(own)]  # type: ignore[arg-type]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        told = self._all([tensor.clone() for tensor in tensors])
        for place, tensor in enumerate(tensors):
            tensor.copy_(sum(of_rank[place] for of_rank in told))  # type: ignore[index]


def on_ranks(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` returns on each rank. Raises what the first of them raised."""
    meeting = _Meeting(count)
    results: list[T | None] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def share(samples: Sequence[TrainSample], rank: int, count: int) -> list[TrainSample]:
    """The samples that a rank fetches of a batch that lists them in this order."""
    owners = split([len(s.prompt_tokens) + len(s.tokens) for s in samples], count)
    return [sample for sample, owner in zip(samples, owners.tolist(), strict=True) if owner == rank]
