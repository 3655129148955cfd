"""The HTTP side: routes, sessions by API key, bounds, errors in OpenAI's form, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from actors.episode.endpoint import chat, completions, responses
from actors.episode.endpoint.asking import ask_chat, ask_response, ask_texts
from actors.episode.endpoint.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    EndBody,
    ResponsesBody,
    RewardBody,
    read_body,
    read_json,
    read_model,
)
from actors.episode.endpoint.config import EndpointConfig
from actors.episode.endpoint.errors import ApiError, bad, too_busy
from actors.episode.endpoint.registry import Registry
from actors.episode.endpoint.session import Exchange, Question, Session

log = structlog.get_logger()

AGAIN_HEADER = "x-stainless-retry-count"  # of OpenAI's clients: how often this request was sent before
REWARD_HEADER = "x-rollstream-reward"  # what the answer has earned that this request goes on from
UNHEEDED_HEADER = "x-rollstream-unheeded"
ID_HEADER = "x-request-id"
BODY_S = 60.0  # for a request's body to arrive
SLOW_S = 60.0  # for a client to take what it is sent
TURNED_AWAY_MAX = 4096  # requests whose refusal is remembered
LINE_ENDS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})  # to some readers of streams

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False, slots=True)
class _Place:
    """What a request that is served has. `again`: it was sent before, and may have been asked then; `asked` is now."""

    session: Session
    again: bool
    asked: list[Exchange] = field(default_factory=list)


class Server:
    """Serves one registry of sessions. `temperature` and `max_new_tokens` are the recipe's."""

    def __init__(
        self,
        registry: Registry,
        config: EndpointConfig,
        model: str,
        temperature: float,
        max_new_tokens: int,
        token: str | None = None,
    ) -> None:
        self._registry = registry
        self._config = config
        self._model = model
        self._temperature = temperature
        self._limit = max_new_tokens
        self._token = token
        self._in_flight = asyncio.Semaphore(config.requests_max)
        self._waiting = 0  # requests that wait for room
        self._turned_away: OrderedDict[bytes, int] = OrderedDict()  # digests of requests, and how often
        self._unheeded: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises `OSError` if it is taken."""
        app = web.Application(client_max_size=self._config.body_mib_max << 20, middlewares=[_errors])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._named_model),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/responses", self._responses),
                web.post("/v1/rewards", self._reward),
                web.post("/v1/sessions", self._hand_out),
                web.post("/v1/sessions/{id}/end", self._end),
            ]
        )
        # A client that hangs up cancels its handler; the question goes on in its session.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await site.start()
        addresses: Any = self._runner.addresses
        return int(addresses[0][1])

    async def close(self) -> None:
        """Hang up."""
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- answers

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = read_body(ChatBody, await self._read(request))
        async with self._served(request) as place:
            session = place.session
            exchange = await self._asked(request, place, await ask_chat(body, session, self._limit))
            if body.stream:
                return await self._streamed(request, body, [exchange], chat.stream(body, session, exchange))
            nodes = await exchange.nodes()
            return self._answered(body, [exchange], chat.whole(body, session, exchange, nodes))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = read_body(CompletionBody, await self._read(request))
        async with self._served(request) as place:
            session = place.session
            questions = await ask_texts(body, session, self._limit)
            asked = [await self._asked(request, place, question) for question in questions]
            if body.stream:
                return await self._streamed(request, body, asked, completions.stream(body, session, asked))
            answers = [(exchange, await exchange.nodes()) for exchange in asked]
            return self._answered(body, asked, completions.whole(body, session, answers))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = read_body(ResponsesBody, await self._read(request))
        async with self._served(request) as place:
            session = place.session
            exchange = await self._asked(request, place, await ask_response(body, session, self._limit))
            if body.stream:
                return await self._streamed(request, body, [exchange], responses.stream(body, session, exchange))
            (node,) = await exchange.nodes()
            return self._answered(body, [exchange], responses.whole(body, session, exchange, node))

    async def _asked(self, request: web.Request, place: _Place, question: Question) -> Exchange:
        session, told = place.session, request.headers.get(REWARD_HEADER)
        if told is not None:
            reward = read_model(RewardBody, {"reward": told}).reward
            if question.parent is None:
                raise bad(
                    f"The header {REWARD_HEADER} rewards the answer that a request goes on from; this one is new."
                )
            await session.earn(reward, question.parent)
        exchange = session.ask(question, place.again)
        exchange.listeners += 1
        place.asked.append(exchange)
        return exchange

    def _answered(self, body: Body, exchanges: list[Exchange], answer: dict[str, Any]) -> web.Response:
        for exchange in exchanges:
            exchange.hear()
        return web.json_response(answer, headers=self._headers(body, answer["id"]))

    async def _streamed(
        self, request: web.Request, body: Body, exchanges: list[Exchange], events: AsyncIterator[dict[str, Any]]
    ) -> web.StreamResponse:
        """Server-sent events. What fails before the first one is still an answer of its own."""
        for exchange in exchanges:
            await exchange.begun()
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            first = await anext(events)
            name = first.get("id") or first["response"]["id"]
            response = web.StreamResponse(headers=self._headers(body, name) | {"Cache-Control": "no-cache"})
            response.content_type = "text/event-stream"
            response.charset = "utf-8"
            await response.prepare(request)
            named = "type" in first  # events of the responses API are named, and have no end mark
            try:
                await _send(request, response, _sse(first, named))
                async for event in events:
                    await _send(request, response, _sse(event, named))
                for exchange in exchanges:
                    exchange.hear()
            except ApiError as error:
                failed = error.body()["error"]
                told = {"type": "error", **failed} if named else {"error": failed}
                await _send(request, response, _sse(told, named))
            if not named:
                await _send(request, response, b"data: [DONE]\n\n")
            await response.write_eof()
            return response

    def _headers(self, body: Body, name: str) -> dict[str, str]:
        unheeded = body.unheeded(self._temperature)
        for parameter in unheeded:
            if parameter not in self._unheeded:
                self._unheeded.add(parameter)
                log.warning(
                    "parameter_not_heeded",
                    parameter=parameter,
                    reason="how to sample is the recipe's to say: the trainer must know the distribution",
                )
        return {ID_HEADER: name} | ({UNHEEDED_HEADER: ", ".join(unheeded)} if unheeded else {})

    # ---- sessions

    @contextlib.asynccontextmanager
    async def _served(self, request: web.Request) -> AsyncIterator[_Place]:
        """The session of a request, and room for it. Raises `ApiError`."""
        session = await self._registry.find(_key(request), self._config.wait_s)
        sent_before = request.headers.get(AGAIN_HEADER, "0") != "0"
        place = _Place(session, sent_before and not await self._was_turned_away(request))
        await self._room(request)
        session.open += 1
        try:
            yield place
        finally:
            for exchange in place.asked:
                exchange.listeners -= 1
            session.open -= 1
            session.touch()
            self._in_flight.release()

    async def _room(self, request: web.Request) -> None:
        """Wait for room; as many may wait as may be in flight, since each holds its body. Raises `ApiError`."""
        most = self._config.requests_max
        if self._waiting < most:
            self._waiting += 1
            try:
                async with asyncio.timeout(self._config.wait_s):
                    await self._in_flight.acquire()
                return
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        digest = await _digest(request)
        self._turned_away[digest] = self._turned_away.pop(digest, 0) + 1
        if len(self._turned_away) > TURNED_AWAY_MAX:
            self._turned_away.popitem(last=False)
        raise too_busy(f"{most} requests are in flight, as many as may be.")

    async def _was_turned_away(self, request: web.Request) -> bool:
        """Whether a request that its client sends again was refused for want of room: then it was never asked, and an
        answer to another like it is not its own."""
        digest = await _digest(request)
        times = self._turned_away.pop(digest, 0)
        if times > 1:
            self._turned_away[digest] = times - 1
        return times > 0

    async def _read(self, request: web.Request) -> bytes:
        """The body, of those who have a key. Raises `ApiError`."""
        self._registry.check(_key(request))
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_S:g} s.", code="body_too_slow") from None

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        body = read_model(RewardBody, read_json(await self._read(request)))
        session = await self._registry.find(_key(request), self._config.wait_s)
        node = session.node_of(body.response_id, body.choice) if body.response_id is not None else None
        await session.earn(body.reward, node)
        return web.json_response({"object": "reward", "reward": body.reward, "response_id": body.response_id})

    async def _hand_out(self, request: web.Request) -> web.StreamResponse:
        """A task for an external agent."""
        if self._token is not None and not hmac.compare_digest(
            _key(request).encode(errors="replace"), self._token.encode()
        ):
            raise ApiError(401, "Show the run's agent token as the API key to get a session.", code="invalid_api_key")
        session = await self._registry.take(self._config.wait_s)
        try:
            await session.take()
            return web.json_response(
                {
                    "object": "session",
                    "id": session.id,
                    "api_key": session.key,
                    "base_url": f"{request.scheme}://{request.host}/v1",
                    "model": self._model,
                    **session.task,
                }
            )
        except BaseException:
            self._registry.give_back(session)
            raise

    async def _end(self, request: web.Request) -> web.StreamResponse:
        raw = await self._read(request)
        body = read_model(EndBody, read_json(raw) if raw.strip() else {})
        try:
            session = await self._registry.find(_key(request), self._config.wait_s)
        except ApiError as error:
            if error.code != "session_ended":
                raise
            return web.json_response({"object": "session", "id": request.match_info["id"], "ended": True})
        if request.match_info["id"] not in ("current", session.id):
            raise ApiError(404, "The API key is that of another session.", param="id")
        await session.end(body.reward, body.drop or "")
        return web.json_response({"object": "session", "id": session.id, "ended": True})

    # ---- the rest

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "sessions": len(self._registry)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._told_model(self._model)]})

    async def _named_model(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._told_model(request.match_info["name"]))

    def _told_model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "rollstream"}


def _sse(event: dict[str, Any], named: bool) -> bytes:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)
    return (f"event: {event['type']}\n" if named else "").encode() + f"data: {data}\n\n".encode()


async def _send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Raises `ConnectionError` if the client does not take it: others wait for its place."""
    try:
        async with asyncio.timeout(SLOW_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has taken nothing for {SLOW_S:g} s") from None


async def _digest(request: web.Request) -> bytes:
    """What a request is known by if it is sent again. Its body has been read."""
    return hashlib.sha256(_key(request).encode(errors="replace") + await request.read()).digest()


def _key(request: web.Request) -> str:
    """The API key. Raises `ApiError`."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise ApiError(401, "Send the session's API key: Authorization: Bearer KEY.", code="invalid_api_key")
    return key.strip()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(error)
    except web.HTTPRequestEntityTooLarge as error:
        return _refusal(ApiError(413, f"The body is too large: {error.reason}.", code="body_too_large"))
    except web.HTTPNotFound:
        return _refusal(ApiError(404, f"There is no {request.method} {request.path[:200]} here.", code="not_found"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _refusal(ApiError(405, f"{request.path[:200]} takes {allowed}, not {request.method}."))
    except web.HTTPException as error:
        return _refusal(ApiError(error.status, error.reason or "refused"))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("request_failed", path=request.path)
        return _refusal(ApiError(500, "The endpoint failed over this request; its log says where."))


def _refusal(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 409:  # which OpenAI's client would try again
        headers["x-should-retry"] = "false"
    return web.json_response(error.body(), status=error.status, headers=headers)
