"""The HTTP side: routes, sessions by API key, bounds, errors in OpenAI's form, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        body = read_body(ChatBody, await request.read())
        async with self._served(request) as session:
            exchange = await self._asked(request, session, ask_chat(body, session, self._limit))
            if body.stream:
                return await self._streamed(request, body, [exchange], chat.stream(body, session, exchange))
            nodes = await exchange.nodes()
            return self._answered(body, [exchange], chat.whole(body, session, exchange, nodes))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = read_body(CompletionBody, await request.read())
        async with self._served(request) as session:
            questions = ask_texts(body, session, self._limit)
            asked = [await self._asked(request, session, question) for question in questions]
            if body.stream:
                return await self._streamed(request, body, asked, completions.stream(body, session, asked))
            answers = [(exchange, await exchange.nodes()) for exchange in asked]
            return self._answered(body, asked, completions.whole(body, session, answers))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = read_body(ResponsesBody, await request.read())
        async with self._served(request) as session:
            exchange = await self._asked(request, session, ask_response(body, session, self._limit))
            if body.stream:
                return await self._streamed(request, body, [exchange], responses.stream(body, session, exchange))
            (node,) = await exchange.nodes()
            return self._answered(body, [exchange], responses.whole(body, session, exchange, node))

    async def _asked(self, request: web.Request, session: Session, question: Question) -> Exchange:
        told = request.headers.get(REWARD_HEADER)
        if told is not None:
            reward = read_model(RewardBody, {"reward": told}).reward
            if question.parent is None:
                raise bad(
                    f"The header {REWARD_HEADER} rewards the answer that a request goes on from; this one is new."
                )
            await session.earn(reward, question.parent)
        return session.ask(question, again=request.headers.get(AGAIN_HEADER, "0") != "0")

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
                await response.write(_sse(first, named))
                async for event in events:
                    await response.write(_sse(event, named))
                for exchange in exchanges:
                    exchange.hear()
            except ApiError as error:
                failed = error.body()["error"]
                await response.write(_sse({"type": "error", **failed} if named else {"error": failed}, named))
            if not named:
                await response.write(b"data: [DONE]\n\n")
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
    async def _served(self, request: web.Request) -> AsyncIterator[Session]:
        """The session of a request, with room for it. Raises `ApiError`."""
        session = await self._registry.find(_key(request), self._config.wait_s)
        try:
            async with asyncio.timeout(self._config.wait_s):
                await self._in_flight.acquire()
        except TimeoutError:
            raise too_busy(f"{self._config.requests_max} requests are in flight, as many as may be.") from None
        session.open += 1
        try:
            yield session
        finally:
            session.open -= 1
            session.touch()
            self._in_flight.release()

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        body = read_model(RewardBody, read_json(await request.read()))
        session = await self._registry.find(_key(request), self._config.wait_s)
        node = session.node_of(body.response_id, body.choice) if body.response_id is not None else None
        await session.earn(body.reward, node)
        return web.json_response({"object": "reward", "reward": body.reward, "response_id": body.response_id})

    async def _hand_out(self, request: web.Request) -> web.StreamResponse:
        """A task for an external agent."""
        if self._token is not None and not hmac.compare_digest(_key(request).encode(), self._token.encode()):
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
        raw = await request.read()
        body = read_model(EndBody, read_json(raw) if raw.strip() else {})
        session = await self._registry.find(_key(request), self._config.wait_s)
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
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {event['type']}\n" if named else "").encode() + f"data: {data}\n\n".encode()


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
    return web.json_response(error.body(), status=error.status, headers=headers)
