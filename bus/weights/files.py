"""What the files of weights are called, how they are written and checked, and what can be wrong with them.

```
v000005-1f3a90bc.safetensors            version 5, full; the digits begin its digest
v000006-77e0c1d4.on000005.delta         version 6, as changes of version 5; the digits begin the digest of the result
v000006-5a0b9f21.on000000.adapter       version 6, as a LoRA adapter over version 0
```
A name tells on which version a file stands, so that a folder of them can be tidied up without the log.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import TypeAlias

from schemas import WeightVersion

Buffer: TypeAlias = bytes | bytearray | memoryview

ASIDE = ".tmp-"
SHA256 = "sha256-"
_NAME = re.compile(r"v(\d{6,10})-([0-9a-f]{8})(?:\.on(\d{6,10}))?\.(\w+)")


class WeightsError(Exception):
    """The bytes of a weight version cannot be used."""


class WeightsMissing(WeightsError):
    """There is no such file."""


class WeightsCorrupt(WeightsError):
    """The bytes are not those that were published."""


def digest_of(content: Buffer) -> str:
    """`sha256-` and 64 hex digits."""
    return f"{SHA256}{hashlib.sha256(content).hexdigest()}"


def digest_of_file(path: Path) -> str:
    """As `digest_of`, of a file's bytes. Raises `OSError`."""
    with open(path, "rb") as file:
        return f"{SHA256}{hashlib.file_digest(file, 'sha256').hexdigest()}"


def full_file(version: int, digest: str, nbytes: int) -> WeightVersion:
    """What announces the full file of a version."""
    return WeightVersion(version=version, path=full_name(version, digest), digest=digest, nbytes=nbytes)


def full_name(version: int, full_digest: str) -> str:
    """The name of the file with all weights of a version, of this digest."""
    return f"v{version:06d}-{full_digest.removeprefix(SHA256)[:8]}.safetensors"


def delta_name(version: int, full_digest: str, base: int) -> str:
    """The name of the file with what changed from `base` to a version, whose full file has this digest."""
    return f"v{version:06d}-{full_digest.removeprefix(SHA256)[:8]}.on{base:06d}.delta"


def adapter_name(version: int, digest: str, base: int) -> str:
    """The name of the file with a version's LoRA adapter over the full version `base`."""
    return f"v{version:06d}-{digest.removeprefix(SHA256)[:8]}.on{base:06d}.adapter"


def version_and_base(name: str) -> tuple[int, int] | None:
    """The version that a file holds and the one that it stands on, -1 for a full one; None if it holds none."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[3]) if found[3] else -1) if found else None


def check_file(event: WeightVersion, path: Path) -> Path:
    """`path`, if the bytes there are those of `event`. Raises WeightsMissing or WeightsCorrupt."""
    try:
        nbytes = path.stat().st_size
        if nbytes != event.nbytes:
            raise WeightsCorrupt(_damaged(event, path, f"has {nbytes} bytes instead of {event.nbytes}"))
        digest = digest_of_file(path)
    except OSError as error:
        raise WeightsMissing(f"version {event.version} cannot be read at {path}: {error.strerror}") from None
    if digest != event.digest:
        raise WeightsCorrupt(_damaged(event, path, f"has digest {digest} instead of {event.digest}"))
    return path


def _damaged(event: WeightVersion, path: Path, what: str) -> str:
    return (
        f"version {event.version} at {path} {what}: delete it and restart the trainer, which writes its newest "
        "version again, in full"
    )


def write_whole(path: Path, content: Buffer, *, durable: bool) -> None:
    """Put `content` at `path`, whole or not at all; with `durable` it outlives a power cut once this returns."""
    aside = path.with_name(f"{ASIDE}{path.name}-{os.getpid()}")
    try:
        with open(aside, "wb", buffering=0) as file:
            left = memoryview(content).cast("B")
            while left:
                left = left[file.write(left) :]
            if durable:
                os.fsync(file.fileno())
        aside.chmod(0o644)  # workers may run as other users
        os.rename(aside, path)
        if durable:
            sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk: a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
