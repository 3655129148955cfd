"""The episode that an agent is: a session is opened, the agent talks, and what was said becomes the trajectory.

A managed agent is started for each prompt, and begins anew with its worker; the log answers what it asks again. An
external one comes from anywhere, takes a session and outlives the worker; its session is made again from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import structlog

from actors import clock
from actors.episode.config import EpisodeConfig
from actors.episode.encoding import Encoding
from actors.episode.endpoint.agents import AgentFailed, Agents
from actors.episode.endpoint.messages import kept
from actors.episode.endpoint.place import Place
from actors.episode.endpoint.prompt_text import ChatTokenizer
from actors.episode.endpoint.recorded import note_writer, recorded_notes, recorded_questions
from actors.episode.endpoint.registry import Registry
from actors.episode.endpoint.session import Session
from actors.episode.endpoint.tree import messages_of
from actors.episode.policy import GivenUp, Policy
from actors.episode.trajectory import Said, Trajectory
from actors.functions import path_of
from bus.port import Bus
from schemas import Prompt, UserError

log = structlog.get_logger()

EXTERNAL = "external"
TOKEN_CHARS_MIN = 16
END_GRACE_S = 2.0  # for an agent to leave by itself once it has ended its session
LOOK_EVERY_S = 0.5


class AgentEpisode:
    """`model` is what the model is called; `place` is where the port and the secret of the keys are kept."""

    replayable = True
    place = ""  # agents tell themselves where they failed

    def __init__(
        self,
        bus: Bus,
        config: EpisodeConfig,
        base: Path,
        place: Place,
        tokenizer: ChatTokenizer,
        model: str,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        from actors.episode.endpoint.server import Server

        check_agent(config, base)
        self.external = config.agent == EXTERNAL
        self.keeps_time = self.external  # a session that waits for an agent is not late
        self._bus = bus
        self._config = config
        self._place = place
        self._tokenizer = tokenizer
        self._encoding = Encoding(tokenizer)
        self._registry = Registry(place.secret)
        token = os.environ.get(config.endpoint.token_env) or None
        self._server = Server(self._registry, config.endpoint, model, temperature, max_new_tokens, token)
        self._agents = None if self.external else Agents(config.agent or "", config.command, base)
        self.port = 0

    @property
    def url(self) -> str:
        """Where agents on this machine find the model."""
        host = self._config.endpoint.host
        near = "127.0.0.1" if host in ("0.0.0.0", "localhost") else "::1" if host == "::" else host
        return f"http://{f'[{near}]' if ':' in near else near}:{self.port}/v1"

    async def start(self) -> None:
        """Listen, and import the agent. Raises `UserError`."""
        self.port = await self._place.listen(self._server, self._config.endpoint.host)
        log.info("endpoint_listens", url=self.url)
        if self._agents is not None:
            await self._agents.start()

    async def close(self) -> None:
        """Hang up, and kill the agents."""
        if self._agents is not None:
            await self._agents.close()
        await self._server.close()
        self._encoding.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Trajectory:
        """The trajectory of a session. Raises `AgentFailed`, `GivenUp`."""
        sample = prompt.sample_id
        task = {"prompt": prompt.prompt} | {
            name: prompt.task[name] for name in self._config.endpoint.task_fields if name in prompt.task
        }
        notes = await recorded_notes(self._bus, sample) if self.external else []
        session = Session(
            self._registry.key_of(sample),
            sample,
            policy,
            self._tokenizer,
            self._encoding,
            task,
            note_writer(self._bus, prompt, len(notes)) if self.external else None,
        )
        try:
            if self.external:
                asked = await recorded_questions(self._bus, sample) if notes else []  # nobody has the key before
                await session.restore(asked, notes)
            await self._registry.open(session, offered=self.external and not session.taken)
            if self._agents is not None:
                await self._managed(self._agents, session, task)
            else:
                await self._visited(session)
        finally:
            self._registry.close(session)
            await session.close()
        return trajectory_of(prompt, session)

    async def _managed(self, agents: Agents, session: Session, task: dict[str, Any]) -> None:
        working = asyncio.ensure_future(agents.run(task, self.url, session.key))
        ending = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await asyncio.wait([working], timeout=END_GRACE_S)
            if working.done() and not session.ended.is_set():
                await session.end(working.result())
        except AgentFailed:
            if not session.bound:
                raise
            session.cut = True
            log.info("agent_cut", sample=session.sample_id, reason=session.bound)
        finally:
            for task_ in (working, ending):
                task_.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    async def _visited(self, session: Session) -> None:
        """Wait until an external agent has ended the session, or has been silent for too long."""
        config = self._config
        taken_s: float | None = None
        while not session.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), min(LOOK_EVERY_S, config.endpoint.idle_s / 4))
            if not session.taken or session.ended.is_set():
                continue
            now_s = clock.monotonic_s()
            taken_s = taken_s or now_s
            silent = not session.open and now_s - session.touched_s > config.endpoint.idle_s
            if now_s - taken_s > config.timeout_s:
                raise GivenUp("timeout", f"the agent took longer than episode.timeout_s {config.timeout_s:g}")
            if silent:
                scored = config.endpoint.on_idle == "score" and bool(session.tree.heard)
                log.warning("session_idle", sample=session.sample_id, idle_s=config.endpoint.idle_s, scored=scored)
                if not scored:
                    raise GivenUp("timeout", f"the agent was silent for {config.endpoint.idle_s:g} s")
                await session.end()


def trajectory_of(prompt: Prompt, session: Session) -> Trajectory:
    """What was said in a session and what it earned. Raises `GivenUp`."""
    if session.dropped:
        raise GivenUp("filtered", f"the agent: {session.dropped}")
    heard = session.tree.heard
    messages = messages_of(heard)
    if isinstance(prompt.prompt, list) and messages[: len(prompt.prompt)] == prompt.prompt:
        messages = messages[len(prompt.prompt) :]
    last = heard[-1].answer if heard else None
    rewarded = any(node.reward is not None for node in heard)
    return Trajectory(
        turns=[Said(node.prompt_tokens, node.answer) for node in heard],
        text=last.text if last is not None else "",
        finish="length" if last is None or session.cut else last.finish,
        messages=[kept(message) for message in messages],
        reward=0.0 if session.reward is None and rewarded else session.reward,
        turn_rewards=[node.reward or 0.0 for node in heard] if rewarded else (),
    )


def check_agent(config: EpisodeConfig, base: Path) -> None:
    """What a recipe says of agents, as far as can be seen before one runs. Raises `UserError`."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError(
            "episode.agent needs the package aiohttp, which is not installed here.",
            "pip install 'rollstream[agents]'.",
        )
    endpoint = config.endpoint
    token = os.environ.get(endpoint.token_env, "")
    if not endpoint.loopback and len(token) < TOKEN_CHARS_MIN:
        raise UserError(
            f"episode.endpoint.host is {endpoint.host}, which others can reach, and the environment variable "
            f"{endpoint.token_env} holds no token of at least {TOKEN_CHARS_MIN} characters.",
            f"Set it, for instance {endpoint.token_env}=$(openssl rand -hex 16), or listen on 127.0.0.1.",
        )
    program = config.command[0] if config.command else ""
    if program and shutil.which(program) is None and not (base / program).is_file():
        raise UserError(f"episode.command begins with {program}, which is no program here.", "Correct it.")
    if config.agent and config.agent.endswith(".py") and not path_of(config.agent, base).is_file():
        raise UserError(
            f"episode.agent names {config.agent}, but there is no file {path_of(config.agent, base)}.",
            "Correct the path; it is relative to the recipe.",
        )
