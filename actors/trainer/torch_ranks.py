"""Ranks over `torch.distributed`, in a job that torchrun or anything of its kind has started."""

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20  # gradients are summed in buckets: DDP's size, and the most memory that a sum takes in addition
TIMEOUT_S = 1800.0  # of one collective: a rank may be loading, saving or publishing meanwhile


class TorchRanks:
    """The process group of this job, over gloo: it is entered here and left by `close`."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def gather(self, own: bytes) -> list[bytes]:
        """See `Ranks`. Sizes first, then the bytes, padded to the longest."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        lengths = [int(size) for size in sizes]
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.count
        padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(parts, padded)
        return [part.numpy().tobytes()[:length] for part, length in zip(parts, lengths, strict=True)]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """See `Ranks`. All tensors are of one dtype and on one device."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            on_host = flat.cpu()  # gloo's own; the same memory on a CPU
            dist.all_reduce(on_host)
            flat.copy_(on_host)
            for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def in_a_job() -> bool:
    """Whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
