"""A chat endpoint on this machine that misbehaves as it is told, one answer after another."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Answer: TypeAlias = Callable[[BaseHTTPRequestHandler], None]


def says(text: Any, usage: bool = True, after_s: float = 0.0) -> Answer:
    """A sound completion."""
    body: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    if usage:
        body["usage"] = {"prompt_tokens": 20, "completion_tokens": 3}

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with handler.server.at_work():  # type: ignore[attr-defined]
            time.sleep(after_s)
        _send(handler, 200, json.dumps(body).encode())

    return answer


def refuses(status: int, retry_after: str = "", body: bytes = b"no") -> Answer:
    """Another status."""
    return lambda handler: _send(handler, status, body, {"Retry-After": retry_after} if retry_after else {})


def garbage(body: bytes = b"<html>") -> Answer:
    """Status 200 and no completion."""
    return lambda handler: _send(handler, 200, body)


def hangs(seconds: float = 30.0) -> Answer:
    """Nothing, for so long."""
    return lambda handler: handler.server.over.wait(seconds)  # type: ignore[attr-defined]


def drips(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then: each arrives before any timeout of a read."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while not handler.server.over.wait(0.05):  # type: ignore[attr-defined]
        handler.wfile.write(b" ")


def breaks_off(handler: BaseHTTPRequestHandler) -> None:
    """Half an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"mess')
    handler.connection.close()


def echoes_the_key(handler: BaseHTTPRequestHandler) -> None:
    """What it was sent, in an error."""
    _send(handler, 401, f"bad: {handler.headers['Authorization']}".encode())


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


class JudgeServer(ThreadingHTTPServer):
    """Gives the answers in turn, the last one for ever, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.running = 0
        self.most_running = 0
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count a call as running. It ends before its answer is sent: the next may come at once after that."""
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that gave up are expected."""


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers["Authorization"])
            server.times.append(time.monotonic())
            answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        assert self.path == "/v1/chat/completions"
        answer(self)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def serving(*answers: Answer) -> Iterator[JudgeServer]:
    """A server that is up."""
    server = JudgeServer(*answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
