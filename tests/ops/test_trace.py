"""Who asks for one sample wants the whole truth about it, in a terminal, in a pipe and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bus.port import Entry, dead_letter_headers
from bus.table import BATCHES, DEAD, PROMPTS, ROLLOUTS, SCORED
from ops import trace
from ops.lives import Life
from ops.log_source import LogSource, open_log
from ops.record import record
from ops.replay.history import read_history
from ops.text import HfTokenizer, visible
from ops.trace import lives_of, parse_target, to_json
from ops.trace_view import print_life, print_lives
from schemas import Batch, Dropped, Prompt, Rollout, Scored, UserError
from tests.ops.recorded_run import STEPS, altered


@pytest.fixture(scope="session")
def tokenizer(recorded: Path) -> HfTokenizer:
    return HfTokenizer(str(recorded.parent / "initial"))


@pytest.fixture
def show(tokenizer: HfTokenizer) -> Callable[..., str]:
    """A life as it is printed, by default into a pipe."""

    def shown(life: Life, terminal: bool = False) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200, highlight=False, _environ={})
        print_life(life, tokenizer, console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    return shown


async def life_of(source: LogSource, sample: str) -> Life:
    (life,) = await lives_of(source, await read_history(source), parse_target(sample))
    return life


async def of_two_versions(source: LogSource) -> Rollout:
    """A rollout that an update interrupted."""
    async for entry in source.read(ROLLOUTS):
        rollout = entry.message()
        if isinstance(rollout, Rollout) and len(rollout.segments) > 1:
            return rollout
    raise AssertionError("no answer was interrupted")


async def test_a_handed_over_answer_is_told_token_by_token(
    recorded: Path, tokenizer: HfTokenizer, show: Callable[..., str]
) -> None:
    """Two workers, two versions: which token came from which weights is what one asks a trace for."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    rollout = await of_two_versions(log)
    (old, many), (new, more) = rollout.segments[:2]
    seq = (await life_of(log, rollout.sample_id)).rollout_seq
    assert seq is not None
    log.change(ROLLOUTS, seq, resumed=1, worker="rollout-b")
    life = await life_of(log, rollout.sample_id)
    told = show(life)
    assert f"version {old}: {many} token" in told
    assert f"version {new}: {more} token" in told
    assert "by rollout-b" in told
    assert "handed over 1 time before" in told
    pieces = tokenizer.pieces(rollout.tokens.tolist())
    marked = f"v{old}▸ {''.join(map(visible, pieces[:many])).strip()} v{new}▸"
    assert marked in " ".join(told.split())
    assert "\x1b[" not in told
    colourful = show(life, terminal=True)
    assert "\x1b[36m" in colourful
    assert "\x1b[33m" in colourful


async def test_the_advantage_is_that_of_the_trained_batch(recorded: Path, show: Callable[..., str]) -> None:
    """By hand: the reward's distance from the group's mean, over the group's standard deviation and 1e-5."""
    async with open_log(str(recorded)) as source:
        (entry,) = await source.get(BATCHES, [2])
        batch = entry.message()
        assert isinstance(batch, Batch)
        lives = await lives_of(source, await read_history(source), ("step", 1))
    assert [life.id for life in lives] == batch.sample_ids
    for life, reward in zip(lives, batch.rewards.tolist(), strict=True):
        group = batch.rewards[batch.group_ids == life.group_id]
        assert life.training is not None
        expected = (reward - group.mean()) / (group.std(ddof=1) + 1e-5)
        assert life.rollout is not None
        assert life.training.advantages == pytest.approx([expected] * len(life.rollout.tokens))
        assert life.training.group_rewards == group.tolist()
        assert life.scored is not None
        assert life.scored.reward == reward
    told = show(lives[0])
    assert "trained in step 1" in told
    assert f"{lives[0].training.advantages[0]:+.4f}; rewards of group" in told  # type: ignore[union-attr,index]


async def test_a_life_is_told_in_the_order_of_the_clock(recorded: Path) -> None:
    async with open_log(str(recorded)) as source:
        life = await life_of(source, "1-0")
    times = [life.admitted_s, life.rollout_s, life.scored_s, life.training.batched_s, life.training.trained_s]  # type: ignore[union-attr]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert life.prompt is not None
    assert life.rollout is not None
    assert life.rollout.prompt == life.prompt.prompt


async def test_tokens_that_were_too_old_are_marked(recorded: Path, show: Callable[..., str]) -> None:
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    rollout = await of_two_versions(log)
    step = (await life_of(log, rollout.sample_id)).training.step  # type: ignore[union-attr]
    bound = step - rollout.segments[1][0]
    log.change(BATCHES, step + 1, max_staleness=bound)
    life = await life_of(log, rollout.sample_id)
    assert life.training is not None
    assert life.training.masked == sum(n for version, n in rollout.segments if step - version > bound) > 0
    assert life.training.advantages is not None
    assert len(life.training.advantages) == len(rollout.tokens) - life.training.masked
    assert f"{life.training.masked} tokens masked" in show(life)
    assert "old, masked" in show(life)


async def test_drops_and_dead_letters_are_told_with_their_reasons(recorded: Path, show: Callable[..., str]) -> None:
    """A sample that was never trained is the one that people ask for."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    (entry,) = await log.get(PROMPTS, [1])
    prompt = entry.message()
    assert isinstance(prompt, Prompt)
    stored = log.put(dataclasses.replace(prompt, group_id=900, index=0))
    log.put_raw(Entry(DEAD, 1, "prompts", dead_letter_headers(log.run, stored, "it burst"), b"", stored.time_s + 1))
    log.put(Dropped(group_id=900, index=0, reason="dead_letter", tokens=3, detail="it burst\x1b[31m"))
    told = show(await life_of(log, "900-0"))
    assert "dropped: dead_letter" in told
    assert "dead letter from prompts: it burst" in told
    assert "cost 3 tokens" in told
    assert "\x1b" not in told  # what others wrote does not drive our terminal


async def test_a_drop_that_only_the_batch_tells_is_found(recorded: Path) -> None:
    """A controller that died between its two records leaves the first."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    (entry,) = await log.get(PROMPTS, [1])
    prompt = entry.message()
    assert isinstance(prompt, Prompt)
    log.put(dataclasses.replace(prompt, group_id=901, index=1))
    log.change(BATCHES, 3, dropped=[["901-1", "stale", "12"]])
    life = await life_of(log, "901-1")
    assert life.dropped is not None
    assert (life.dropped.reason, life.dropped.tokens) == ("stale", 12)
    assert life.fate == "dropped: stale"


async def test_a_verdict_that_is_no_score_is_told(recorded: Path, show: Callable[..., str]) -> None:
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    (entry,) = await log.get(SCORED, [1])
    scored = entry.message()
    assert isinstance(scored, Scored)
    log.change(SCORED, 1, verdict="error", reward=None, detail="ValueError: no answer")
    assert "error: ValueError: no answer" in show(await life_of(log, scored.sample_id))


async def test_json_has_everything(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await trace.main("2-1", str(recorded), True) == 0
    told = json.loads(capsys.readouterr().out)
    tokens = told["rollout"]["tokens"]
    assert len(tokens) == len(told["rollout"]["logprobs"]) == len(told["rollout"]["versions"])
    assert len(told["rollout"]["pieces"]) == len(tokens)
    assert set(told["times"]) >= {"admitted", "generated", "scored", "batched", "trained"}
    assert told["training"]["step"] in range(STEPS)
    assert await trace.main("step:0", str(recorded), True) == 0
    assert len(json.loads(capsys.readouterr().out)) == 8


async def test_groups_and_steps_are_tables(recorded: Path, tokenizer: HfTokenizer) -> None:
    async with open_log(str(recorded)) as source:
        lives = await lives_of(source, await read_history(source), parse_target("3"))
    console = Console(file=io.StringIO(), width=100, highlight=False)
    print_lives("group 3", lives, tokenizer, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines[2:6]] == ["3-0", "3-1", "3-2", "3-3"]
    assert all(len(line) <= 100 for line in lines)
    assert to_json(lives[0], tokenizer)["id"] == "3-0"
    console = Console(file=io.StringIO(), width=60, highlight=False)
    print_lives("group 3", lives, tokenizer, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[1].split() == ["sample", "tokens", "reward", "advantage", "answer"]  # what can be done without
    assert [line.split()[0] for line in lines[2:6]] == ["3-0", "3-1", "3-2", "3-3"]


@pytest.mark.parametrize(
    ("asked", "message", "remedy"),
    [
        ("12_3", "names no sample", "Did you mean 12-3?"),
        ("sample 7", "names no sample", "Did you mean 7 or step:7?"),
        ("", "names no sample", "step:7 all samples of step 7"),
        ("999-0", "There is no sample 999-0", "holds groups 0 to 7, each with samples 0 to 3"),
        ("2-9", "There is no sample 2-9", "Did you mean 2-3?"),
        ("77", "There is no group 77", "holds groups 0 to 7"),
        ("step:9", "has no step 9", "steps 0 to 3"),
    ],
)
async def test_what_is_not_there_is_told_with_what_is(recorded: Path, asked: str, message: str, remedy: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        await trace.main(asked, str(recorded), False)
    assert remedy in raised.value.remedy


def test_the_pieces_of_an_answer_are_its_text(tokenizer: HfTokenizer) -> None:
    """Token by token, with the blanks where they belong, or the colours would stand beside their tokens."""
    tokens = np.random.default_rng(0).integers(0, 70, 200).tolist()
    pieces = tokenizer.pieces(tokens)
    assert "".join(pieces) == tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)
    assert tokenizer.pieces([]) == []


def test_a_character_of_several_tokens_is_told_once() -> None:
    """Byte-level vocabularies cut characters into pieces that are no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    of_bytes = HfTokenizer.__new__(HfTokenizer)
    of_bytes._tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)
    tokens = of_bytes._tokenizer("a é€ b")["input_ids"]
    pieces = of_bytes.pieces(tokens)
    assert pieces == ["a", " ", "", "é", "", "", "€", " ", "b"]
    assert of_bytes.pieces(tokens[:-3])[-1] == "\ufffd"


def test_whitespace_can_be_seen() -> None:
    assert visible("a\n\tb ") == "a↵⇥b "
    assert (visible(" "), visible(""), visible("\x1b[31m")) == ("·", "", "\\x1b[31m")


async def test_a_recording_without_a_model_tells_token_ids(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever may not pass the model on can still pass the log on."""
    path = tmp_path / "bare.rollstream"
    async with open_log(str(recorded)) as source:
        await record(source, path, None)
        life = await life_of(source, "2-1")
    assert await trace.main("2-1", str(path), False) == 0
    assert life.rollout is not None
    assert " ".join(map(str, life.rollout.tokens[:3].tolist())) in capsys.readouterr().out


async def test_a_run_that_has_not_trained_yet_can_be_asked(recorded: Path) -> None:
    """The first samples are those that people look at while they wait."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    for stream in ("batches", "weights", "steps"):
        log.purge(stream, 1000)
    life = await life_of(log, "0-0")
    assert life.fate == "waits for a batch"
    assert life.training is None


async def test_a_trajectory_is_told_turn_by_turn(
    recorded: Path, tokenizer: HfTokenizer, show: Callable[..., str]
) -> None:
    """What the model was told stands in brackets and in a colour of its own, and counts as nobody's."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    (entry,) = await log.get(BATCHES, [2])
    batch = entry.message()
    assert isinstance(batch, Batch)
    seq = int(batch.rollout_seqs[0])
    old = (await log.get(ROLLOUTS, [seq]))[0].message()
    assert isinstance(old, Rollout)
    words = old.tokens[:1].tolist() * 3 + old.prompt_tokens[:2].tolist() + old.tokens[:1].tolist() * 2
    log.change(
        ROLLOUTS,
        seq,
        prompt_tokens=[*old.prompt_tokens.tolist(), 5],
        tokens=words,
        logprobs=[-1, -1, -1, 0, 0, -1, -1],
        segments=[(0, 5), (1, 2)],
        observations=[3, 2],
        sequences=[len(old.prompt_tokens), 6, 1, 1],
        messages=[{"role": "assistant", "content": "one"}, {"role": "tool", "content": None, "name": "add"}],
    )
    life = await life_of(log, old.sample_id)
    told = show(life)
    pieces = [visible(piece) for piece in tokenizer.pieces(words)]
    assert f"⟨{''.join(pieces[3:5])}⟩ v1▸" in told
    assert "sequence 2▸" in told
    assert "version 0: 3 tokens, 1 version old" in told
    assert "version 1: 2 tokens, on-policy" in told
    assert "told: 2 tokens, never trained" in told
    assert "3 in 2 sequences; told between them 2 tokens" in told
    assert "mean -1.000, least -1.000 nats" in told
    assert "assistant: one" in told
    assert 'tool:  {"name": "add"}' in told
    assert life.training is not None
    assert life.training.advantages is not None
    assert len(life.training.advantages) == 5
    assert to_json(life, tokenizer)["rollout"]["made"] == [True, True, True, False, False, True, True]
    assert "\x1b[3;90m" in show(life, terminal=True)
