"""Weights' bytes over the bus, for readers that do not see the directory: files as chunks in streams of the run.

```
rs.<run>.blobs.<part>.<file>.<chunk>    up to CHUNK_BYTES of it; each part has a stream and a connection of its own
rs.<run>.blobs.0.<file>.info            {"nbytes": ..., "parts": [[first byte, bytes], ...]}, when all of it is there
```
A chunk's subject says where it belongs, and holds one message: storing a file again changes nothing. Bytes go from the
caller's memory to the socket and back, several acknowledgements at a time are waited for, and several streams keep the
server's cores busy, since it stores the messages of one stream one after another. The client's own object store copies
each chunk through the event loop, one at a time.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from bus.port import BusFull, BusUnavailable
from bus.publish import NO_STORAGE, STORE_FAILED
from bus.table import check_run_name
from bus.weights.files import Buffer, WeightsMissing
from bus.weights.wire import NO_MEMORY, Broken, Wire
from schemas import UserError

T = TypeVar("T")

CHUNK_BYTES: Final = 1 << 20
PARTS: Final = 4  # of a file, at most
WINDOW: Final = 4  # chunks on the way that are not yet acknowledged, of each part; more cost the server CPU
BATCH_BYTES: Final = 16 << 20  # that are asked for at once, of each part; the server holds them in memory
BATCH_CHUNKS: Final = 16
DEADLINE_S: Final = 60.0  # without success; then the bus counts as unreachable
RETRY_S: Final = 0.2
STREAM_BYTES_MAX: Final = 64 << 30
STREAM_NOT_FOUND: Final = 10059
STREAM_EXISTS: Final = 10058


class ObjectRoad:
    """Files on the server of a run. All methods block; give them a thread.

    Raises `BusUnavailable` if the server cannot be reached for `DEADLINE_S`, and `UserError` if it refuses us.
    """

    def __init__(self, url: str, run: str, replicas: int = 1) -> None:
        self._url = url
        self._name = f"RS_{check_run_name(run)}_blobs"
        self._subject = f"rs.{run}.blobs"
        self._replicas = replicas
        self._created = False

    def put(self, name: str, content: Buffer) -> None:
        """Store a file under a name, whole and durable once this returns. Raises `BusFull`."""
        self._create()
        whole = memoryview(content).cast("B")
        parts = _parts(len(whole))
        with ThreadPoolExecutor(len(parts)) as threads:
            jobs = [
                threads.submit(self._tried, lambda wire, i=i, at=at, size=size: _send_part(
                    wire, self._of(name, i), whole[at : at + size]
                ))
                for i, (at, size) in enumerate(parts)
            ]  # fmt: skip
            for job in jobs:
                job.result()
        info = json.dumps({"nbytes": len(whole), "parts": parts}).encode()
        self._tried(lambda wire: _send_part(wire, self._of(name), memoryview(info), "info"))

    def get(self, name: str) -> bytearray:
        """The file that was put under a name. Raises WeightsMissing."""
        info = self._tried(lambda wire: self._info(wire, name))
        content = bytearray(info["nbytes"])
        whole = memoryview(content)
        with ThreadPoolExecutor(len(info["parts"])) as threads:
            jobs = [
                threads.submit(self._tried, lambda wire, i=i, at=at, size=size: self._receive_part(
                    wire, name, i, whole[at : at + size]
                ))
                for i, (at, size) in enumerate(info["parts"])
            ]  # fmt: skip
            for job in jobs:
                job.result()
        return content

    def collect(self, keep: set[str]) -> None:
        """Delete all files but those of these names."""

        def work(wire: Wire) -> None:
            for part in range(PARTS):
                kept = {self._of(name, part) for name in keep}
                stream, body = self._stream(part), {"subjects_filter": f"{self._subject}.{part}.*.0"}
                answer = wire.request(f"$JS.API.STREAM.INFO.{stream}", body)
                if answer.get("error", {}).get("err_code") == STREAM_NOT_FOUND:
                    return
                for subject in _checked(answer)["state"].get("subjects") or {}:
                    file = subject.removesuffix(".0")
                    if file not in kept:
                        _checked(wire.request(f"$JS.API.STREAM.PURGE.{stream}", {"filter": f"{file}.>"}))

        self._tried(work)

    # ---- what a connection does

    def _create(self) -> None:
        if self._created:
            return

        def work(wire: Wire) -> None:
            for part in range(PARTS):
                config = {
                    "name": self._stream(part),
                    "subjects": [f"{self._subject}.{part}.>"],
                    "retention": "limits",
                    "discard": "new",
                    "storage": "file",
                    "max_bytes": STREAM_BYTES_MAX,
                    "max_msgs_per_subject": 1,
                    "num_replicas": self._replicas,
                    "allow_direct": True,
                }
                answer = wire.request(f"$JS.API.STREAM.CREATE.{config['name']}", config)
                if answer.get("error", {}).get("err_code") != STREAM_EXISTS:
                    _checked(answer)

        self._tried(work)
        self._created = True

    def _info(self, wire: Wire, name: str) -> dict[str, Any]:
        body = {"last_by_subj": f"{self._of(name)}.info"}
        answer = wire.request(f"$JS.API.STREAM.MSG.GET.{self._stream(0)}", body)  # of the leader: replicas may lag
        if answer.get("error", {}).get("code") == 404:
            raise WeightsMissing(
                f"the bus holds no {name}: it was collected, or the run does not send weights over the bus; mount the "
                "run's folder here, or start the run with bus.weights=both"
            )
        info: dict[str, Any] = json.loads(base64.b64decode(_checked(answer)["message"]["data"]))
        return info

    def _receive_part(self, wire: Wire, name: str, part: int, into: memoryview) -> None:
        """Fill `into` with the chunks of a part, in whatever order they stand in the stream."""
        missing = -(-len(into) // CHUNK_BYTES)
        seq, ended = 1, False

        def place(_: str, headers: bytes, size: int) -> memoryview:
            nonlocal seq, ended, missing
            ended = size == 0
            if ended:
                return NO_MEMORY
            seq = int(_header(headers, b"Nats-Sequence")) + 1
            at = int(_header(headers, b"Nats-Subject").rpartition(b".")[2]) * CHUNK_BYTES
            if size != min(CHUNK_BYTES, len(into) - at):
                raise Broken("a chunk has another length than its place")
            missing -= 1
            return into[at : at + size]

        while missing:
            asked = {"seq": seq, "batch": min(BATCH_CHUNKS, missing), "next_by_subj": f"{self._of(name, part)}.*"}
            before, ended = missing, False
            body = json.dumps(asked | {"max_bytes": BATCH_BYTES}).encode()
            wire.publish(f"$JS.API.DIRECT.GET.{self._stream(part)}", body)
            while not ended:
                wire.receive(place)
            if missing == before:
                self._info(wire, name)  # or it has just been collected
                raise Broken("chunks are missing, as of a replica that lags")

    def _stream(self, part: int) -> str:
        return f"{self._name}_{part}"

    def _of(self, name: str, part: int = 0) -> str:
        return f"{self._subject}.{part}.{name.replace('.', '_')}"

    def _tried(self, work: Callable[[Wire], T]) -> T:
        """What `work` makes of a connection; another one is tried until `DEADLINE_S`."""
        until_s = time.monotonic() + DEADLINE_S
        while True:
            wire = None
            try:
                wire = Wire(self._url)
                return work(wire)
            except (Broken, BusUnavailable) as error:
                if time.monotonic() > until_s:
                    raise BusUnavailable(f"weights do not pass over the bus: {error}") from None
            finally:
                if wire is not None:
                    wire.close()
            time.sleep(RETRY_S)


def _send_part(wire: Wire, subject: str, content: memoryview, only: str = "") -> None:
    """Store the chunks of a part, or under `only` a single one, with `WINDOW` of them on the way."""
    scratch = memoryview(bytearray(1 << 16))
    on_the_way = 0

    def acknowledged() -> None:
        _, payload = wire.receive(lambda subject, headers, size: scratch[:size])
        _checked(json.loads(bytes(payload)) if payload else {"error": {"description": "no such stream"}})

    for chunk, at in enumerate(range(0, len(content), CHUNK_BYTES)):
        if on_the_way == WINDOW:
            acknowledged()
            on_the_way -= 1
        wire.publish(f"{subject}.{only or chunk}", content[at : at + CHUNK_BYTES])
        on_the_way += 1
    for _ in range(on_the_way):
        acknowledged()


def _parts(nbytes: int) -> list[list[int]]:
    """(first byte, bytes) of about equal parts, none of them empty."""
    chunks = max(1, -(-nbytes // CHUNK_BYTES))
    each = -(-chunks // PARTS) * CHUNK_BYTES
    return [[at, min(each, nbytes - at)] for at in range(0, max(nbytes, 1), each)]


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if it is none of an error. Raises `Broken`, `BusFull`, or `UserError` if we may not."""
    error = answer.get("error")
    if error is None:
        return answer
    told = f"{error.get('description', 'refused')} ({error.get('err_code', '')})"
    if error.get("err_code") in NO_STORAGE:  # of a server that somebody else configured
        raise BusFull(
            f"the NATS server has no room for the streams of weights ({told}): raise max_file_store in its settings, "
            "since streams reserve their bounds, or free some space"
        )
    if error.get("err_code") == STORE_FAILED:
        raise BusFull(f"the stream of weights is full ({told}): lower trainer.keep_versions, or free some space")
    if error.get("code") == 403:
        raise UserError(f"The NATS server refuses to carry weights: {told}.", "Give this user the run's subjects.")
    raise Broken(told)


def _header(headers: bytes, name: bytes) -> bytes:
    at = headers.find(name + b": ")
    if at < 0:
        raise Broken(f"the answer is {headers[:60]!r}")
    start = at + len(name) + 2
    return headers[start : headers.index(b"\r", start)]
