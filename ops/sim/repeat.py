"""Whether seeds repeat exactly: in other processes, and whatever order Python's hashes give to its sets.

`python -m ops.sim.repeat FIRST COUNT` prints the digest of the traces of some seeds.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Final

from ops.sim.run import simulate
from ops.sim.scenario import draw

HASH_SEEDS: Final = ("0", "1", "2")


def digest_of(first: int, count: int) -> str:
    """The digest of the traces of seeds `first` to `first + count - 1`."""
    digest = hashlib.blake2b(digest_size=8)
    for seed in range(first, first + count):
        digest.update(simulate(draw(seed)).trace_hash.encode())
    return digest.hexdigest()


def digests(first: int, count: int) -> dict[str, str]:
    """The digest by `PYTHONHASHSEED`, each from a process of its own."""
    out = {}
    for hash_seed in HASH_SEEDS:
        done = subprocess.run(
            [sys.executable, "-m", "ops.sim.repeat", str(first), str(count)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        out[hash_seed] = done.stdout.strip()
    return out


if __name__ == "__main__":
    print(digest_of(int(sys.argv[1]), int(sys.argv[2])))
