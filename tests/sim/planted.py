"""Bugs planted on purpose: a simulation that does not find them proves nothing by finding none.

Each is an edit of production code, applied in memory for one search. If the code changes so that the edit no longer
applies, that is an error too, so the table stays true.

    python -m tests.sim.planted [--seeds 200] [--jobs 2] [--only WORDS]
"""

from __future__ import annotations
import __future__

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import multiprocessing
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

SEEDS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """In the function at `where` (`module:qualified.name`), `old` is replaced by `new`."""

    name: str
    where: str
    old: str
    new: str
    episodes: bool = False  # does harm in runs with episodes only


BUGS = (
    # The shell.
    Bug(
        "a message is acknowledged before its outputs are stored",
        "bus.shell:_Shell._settle",
        "try:\n        for output in outcome.outputs",
        "if not isinstance(outcome, HandBack):\n        await flight.delivery.ack()\n"
        "    try:\n        for output in outcome.outputs",
    ),
    Bug(
        "an unfinished message is acknowledged instead of handed back",
        "bus.shell:_Shell._settle",
        "await flight.delivery.nak()\n        return\n    if entry.id:",
        "await flight.delivery.ack()\n        return\n    if entry.id:",
    ),
    Bug(
        "what a worker still has when it stops is dropped",
        "bus.shell:_Shell.give_back",
        "await flight.delivery.nak()",
        "await flight.delivery.term()",
    ),
    # The controller.
    Bug(
        "batches are not fenced",
        "actors.controller.actor:Controller._publish",
        "self._batches_seq = await self.bus.publish_fenced([decision.batch], self._batches_seq)",
        "self._batches_seq = (await self.bus.publish(decision.batch)).seq",
    ),
    Bug(
        "prompts are not fenced",
        "actors.controller.actor:Controller._publish",
        "self._prompts_seq = await self.bus.publish_fenced(prompts, self._prompts_seq)",
        "self._prompts_seq = [(await self.bus.publish(prompt)).seq for prompt in prompts][-1]",
    ),
    Bug(
        "a second verdict on a sample counts again",
        "actors.controller.core:ControllerCore.saw_scored",
        "if group is None or scored.index in group.answers or scored.index in group.lost:",
        "if group is None:",
    ),
    Bug(
        "the gate admits one step too many",
        "actors.controller.core:ControllerCore.bound",
        "self.newest_version + 1 if",
        "self.newest_version + 2 if",
    ),
    Bug(
        "a new controller forgets what the last batch dropped",
        "actors.controller.core:ControllerCore.__init__",
        "drops_of(last_batch) if last_batch else []",
        "[]",
    ),
    Bug(
        "a new controller begins to read one entry too late",
        "actors.controller.core:ControllerCore._marks",
        "seq + 1 for name",
        "seq + 2 for name",
    ),
    Bug(
        "a new controller misses the verdicts before the last batch",
        "actors.controller.core:ControllerCore._marks",
        "if group.first_scored_seq is not None:",
        "if False:",
    ),
    Bug(
        "a new controller does not complete a half admitted group",
        "actors.controller.core:ControllerCore._admit",
        "if missing:",
        "if False:",
    ),
    Bug(
        "a filtered group ends only some of its samples",
        "actors.controller.core:ControllerCore._end_group",
        "if index not in group.lost:",
        "if index not in group.lost and index < group.size - 1:",
    ),
    Bug(
        "a group that is complete does not lead to a batch",
        "actors.controller.core:ControllerCore._settle",
        "self._news = True",
        "pass",
    ),
    Bug(
        "the pace may fall below one batch",
        "actors.controller.pace:Pace.__init__",
        "self._batch = batch_groups",
        "self._batch = batch_groups = 1",
    ),
    Bug(
        "a sample one version too old is taken",
        "actors.controller.groups:Group.stale_at",
        "step - version > max_staleness",
        "step - version > max_staleness + 1",
    ),
    # The rollout workers.
    Bug(
        "all tokens are tagged with the version at the end",
        "actors.rollout.actor:RolloutWorker._generated",
        "Made(generation, ",
        "Made(type(generation)(name, prompt_tokens, generation.tokens, generation.logprobs, "
        "((self.engine.version, len(generation.tokens)),), generation.finish), ",
    ),
    Bug(
        "a continued sample forgets which versions made its prefix",
        "actors.rollout.turns:prefix_of",
        "segments=partial.segments",
        "segments=((partial.segments[-1][0], len(partial.tokens)),)",
    ),
    Bug(
        "a sample that is handed over loses its tokens",
        "actors.rollout.actor:RolloutWorker._generated",
        "[partial_of(generation, self.name)] if generation.tokens else []",
        "[]",
    ),
    Bug(
        "a worker begins with older weights than the prompt asks for",
        "actors.rollout.actor:RolloutWorker._generated",
        "if not await self._has_version(message.min_version, VERSION_WAIT_S * delivery.deliveries):",
        "if False:",
    ),
    # The reward workers.
    Bug(
        "a verdict that failed is a silent 0",
        "actors.reward.actor:scored_of",
        "verdict=verdict.status,\n        reward=verdict.reward,",
        'verdict="scored",\n        reward=verdict.reward or 0.0,',
    ),
    Bug(
        "a verdict names another rollout",
        "actors.reward.actor:scored_of",
        "rollout_seq=seq",
        "rollout_seq=max(1, seq - 1)",
    ),
    # The trainer.
    Bug(
        "tokens one version too old are trained",
        "actors.trainer.actor:Trainer._load",
        "fresh = age <= batch.max_staleness",
        "fresh = age <= batch.max_staleness + 1",
    ),
    Bug(
        "the versions of tokens are shifted by one against the tokens",
        "actors.trainer.actor:Trainer._load",
        "age = ages_of(rollout.segments, batch.step)",
        "age = np.roll(ages_of(rollout.segments, batch.step), 1)",
    ),
    Bug(
        "a trainer that starts again skips the batches since its checkpoint",
        "actors.trainer.actor:Trainer._restore",
        "self._published = (await self._gather(await self._published_version()))[0]",
        "self._published = self.version = max(self.version, await self._published_version())",
    ),
    Bug(
        "a checkpoint is kept under the step before it",
        "actors.trainer.actor:Trainer._save",
        "self.checkpoints.save, self.version,",
        "self.checkpoints.save, max(0, self.version - 1),",
    ),
    Bug(
        "a checkpoint is saved before its step is announced",
        "actors.trainer.actor:Trainer._save",
        "await self._publisher.settled()  # or",
        "pass  # or",
    ),
    Bug(
        "versions are not fenced",
        "actors.trainer.publisher:Publisher._announce_version",
        "await self._bus.publish_fenced([event], event.version)",
        "await self._bus.publish(event)",
    ),
    Bug(
        "steps are not fenced",
        "actors.trainer.publisher:Publisher._announce",
        "await self._bus.publish_fenced([done], done.step)",
        "await self._bus.publish(done)",
    ),
    # Episodes.
    Bug(
        "an answer is taken for whatever its episode asks",
        "actors.episode.exchange:Exchange.follow",
        "self._waiting.pop(entry.id, ())",
        'self._waiting.pop(next(turn for turn in self._waiting if turn.startswith(f"{answer.sample_id}/")), ())',
        episodes=True,
    ),
    Bug(
        "observations are marked as the model's",
        "actors.episode.trajectory:_Sequence.add",
        "self.observations.append((len(self.tokens), len(told)))",
        "pass",
        episodes=True,
    ),
    Bug(
        "an answer begins another sequence though it goes on",
        "actors.episode.trajectory:_Sequence.goes_on_in",
        "len(prompt) >= mine",
        "len(prompt) > mine",
        episodes=True,
    ),
    Bug(
        "a prompt is acknowledged before its episode's rollout is stored",
        "actors.episode.actor:EpisodeWorker._handle",
        "return [outcome] if outcome is not None else []",
        "await delivery.ack()\n        return [outcome] if outcome is not None else []",
        episodes=True,
    ),
    Bug(
        "an episode that runs again counts its turns otherwise",
        "actors.episode.policy:Policy.generate",
        "self._number = self._number, self._number + 1",
        "self._number = self._number, self._number + 1 + (self.log.reused > 0)",
        episodes=True,
    ),
    Bug(
        "an episode that can be repeated begins anew with its worker",
        "actors.episode.actor:EpisodeWorker._episode",
        "attempt = 0 if self._replayable else",
        "attempt = again if self._replayable else",
        episodes=True,
    ),
    Bug(
        "an episode that cannot be repeated gets its old answers",
        "actors.episode.actor:EpisodeWorker._episode",
        "attempt = 0 if self._replayable else again * tries + retry",
        "attempt = 0",
        episodes=True,
    ),
    Bug(
        "a log that refuses is held to be the function's failure",
        "actors.episode.actor:EpisodeWorker._episode",
        "except (UserError, BusFull, BusUnavailable):",
        "except UserError:",
        episodes=True,
    ),
    Bug(
        "an episode that is given up ends its group",
        "actors.controller.core:ControllerCore.saw_dropped",
        "and not dropped.worker",
        "",
        episodes=True,
    ),
    Bug(
        "turns of an episode have one seed",
        "actors.episode.policy:seed_of",
        "if (attempt, number, choice) == (0, 0, 0):",
        "if True:",
        episodes=True,
    ),
    Bug(
        "a turn asks for any version",
        "actors.episode.policy:Policy.generate",
        "min_version=self.prompt.min_version",
        "min_version=0",
        episodes=True,
    ),
    Bug(
        "a turn that is stored twice is made twice at once",
        "actors.rollout.actor:RolloutWorker._handle",
        "if (making := self._making.get(message.id)) is not None:",
        "if (making := None) is not None:",
        episodes=True,
    ),
    Bug(
        "an answer goes on to where somebody looked for the string that ends it",
        "actors.rollout.turn_watch:TurnWatch.generate",
        "shortened(generation, stop[0])",
        "generation",
        episodes=True,
    ),
    Bug(
        "observations count as trained",
        "actors.trainer.actor:Trainer._load",
        "ages.append(age[made & fresh])",
        "ages.append(age[fresh])",
        episodes=True,
    ),
)


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Inside, production code has this bug. Raises `LookupError` if the edit does not apply to exactly one place."""
    module_name, _, path = bug.where.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    before = inspect.getattr_static(owner, name)
    function = before.fget if isinstance(before, property) else before
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(bug.old) != 1:
        raise LookupError(f"{bug.where} holds {source.count(bug.old)} times what {bug.name!r} replaces: {bug.old!r}")
    code = compile(
        source.replace(bug.old, bug.new), f"<{bug.name}>", "exec", __future__.annotations.compiler_flag, True
    )
    made: dict[str, Any] = {}
    exec(code, module.__dict__, made)  # the text is ours, above
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a search for one bug came to: the first seed that found it, None if none did, and the promise broken."""

    bug: Bug
    seed: int | None
    violation: str
    seconds: float


def search(bug: Bug, seeds: int = SEEDS) -> Found:
    """Plant a bug and run seeds until one breaks a promise."""
    from ops.sim.run import simulate
    from ops.sim.scenario import draw

    begin_s = time.monotonic()
    with planted(bug):
        for seed in range(seeds):
            scenario = draw(seed)
            if bug.episodes and not scenario.episodes:
                continue
            outcome = simulate(scenario)
            if not outcome.clean:
                return Found(bug, seed, str(outcome.violations[0]), time.monotonic() - begin_s)
    return Found(bug, None, "", time.monotonic() - begin_s)


def main() -> int:
    """Search for each bug and print the table; 1 if one was not found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds that each search may take")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="only bugs whose name holds these words")
    arguments = parser.parse_args()
    chosen = [bug for bug in BUGS if arguments.only in bug.name]
    missed = 0
    print(f"{'planted bug':<72} {'seed':>5}  found by")
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for found in pool.imap(_Search(arguments.seeds), chosen):
            missed += found.seed is None
            seed = "-" if found.seed is None else str(found.seed)
            print(f"{found.bug.name:<72} {seed:>5}  {found.violation[:100] or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted bugs found, each within {arguments.seeds} seeds")
    return 1 if missed else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    seeds: int

    def __call__(self, bug: Bug) -> Found:
        return search(bug, self.seeds)


if __name__ == "__main__":
    sys.exit(main())
