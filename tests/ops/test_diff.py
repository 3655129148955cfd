"""A wrong log-probability is a silent bias: the comparison must find a planted one, and must not cry wolf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.memory import MemoryBus, MemoryHub
from bus.table import BATCHES, ROLLOUTS, WEIGHTS
from ops import diff
from ops.diff import BFLOAT16, FLOAT32, diff_log, judge, tolerance_of
from ops.host import initial_model
from ops.log_source import RunLog, open_log
from ops.mismatch import POSITIONS, Differences, Mismatch
from ops.recipe import load_recipe
from ops.replay.history import read_history
from schemas import Batch, Rollout, UserError
from tests.ops.recorded_run import RECIPE, STEPS, altered, record_altered

FLOAT32_NOISE = 2e-5  # of the built-in engine; see `tests/actors/test_torch_engine.py`


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON, without the log lines before it."""
    out = "\n" + capsys.readouterr().out
    told: dict[str, Any] = json.loads(out[out.rindex("\n{\n") :])
    return told


async def test_the_built_in_engine_and_the_trainer_agree(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every token under the weights that made it, versions in between trained again: float32 noise and nothing else."""
    assert await diff.main(str(recorded), 0, None, 3, True) == 0
    told = printed(capsys)
    assert told["consistent"]
    assert 0 < told["max"] < FLOAT32_NOISE
    assert told["mean"] < 1e-6
    async with open_log(str(recorded)) as source:
        trained = 0
        async for entry in source.read(BATCHES):
            batch = entry.message()
            assert isinstance(batch, Batch)
            rollouts = await source.get(ROLLOUTS, batch.rollout_seqs.tolist())
            trained += sum(len(rollout.message().tokens) for rollout in rollouts)  # type: ignore[attr-defined]
    assert told["tokens"] == trained
    assert sum(found["tokens"] for found in told["by_version"].values()) == trained
    assert set(told["by_version"]) <= {str(version) for version in range(STEPS)}
    assert len(told["by_version"]) > 1
    assert len(told["worst"]) == 3


async def test_a_planted_wrong_logprob_is_the_worst_offender(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the last batch, so that no weights follow from it: the token, its place, its context, and status 1."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    (entry,) = await log.get(BATCHES, [STEPS])
    batch = entry.message()
    assert isinstance(batch, Batch)
    seq = int(batch.rollout_seqs[1])
    rollout = (await log.get(ROLLOUTS, [seq]))[0].message()
    assert isinstance(rollout, Rollout)
    logprobs = rollout.logprobs.copy()
    logprobs[2] -= 0.01
    log.change(ROLLOUTS, seq, logprobs=logprobs)
    path = await record_altered(log, recorded, tmp_path / "planted.rollstream")
    assert await diff.main(str(path), STEPS - 1, None, 5, False) == 1
    told = capsys.readouterr().out
    assert "INCONSISTENT (each token ≤ 0.0001 nats)" in told
    assert await diff.main(str(path), STEPS - 1, None, 5, True) == 1
    worst = printed(capsys)["worst"][0]
    assert (worst["sample_id"], worst["position"]) == (rollout.sample_id, 2)
    assert worst["token"] == rollout.tokens[2]
    assert worst["before"] == rollout.tokens[:2].tolist()
    assert worst["difference"] == pytest.approx(0.01, abs=1e-4)
    assert await diff.main(str(path), 0, STEPS - 1, 5, True) == 0  # the others know nothing of it


async def test_weights_that_a_folder_keeps_need_no_training(recorded: Path) -> None:
    """Of a large model one asks about the newest steps, whose weights lie there."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
        history = await read_history(source)
        in_folder = _InFolder(log, recorded.parent)
        initial = initial_model(recorded.parent)
        kept, how, whole = await diff_log(in_folder, history, initial, STEPS - 1, None, 3)
        again, other, _ = await diff_log(log, history, initial, STEPS - 1, None, 3)
    assert (how, other) == ("weights: the kept files", "weights: trained again from the log")
    assert whole
    assert kept.all == again.all
    assert kept.offenders == again.offenders


class _InFolder(RunLog):
    """A run's folder whose log is in lists."""

    def __init__(self, log: object, folder: Path) -> None:
        super().__init__(MemoryBus("x", MemoryHub()), folder, "")
        self.read = log.read  # type: ignore[attr-defined,method-assign]
        self.get = log.get  # type: ignore[attr-defined,method-assign]
        self.info = log.info  # type: ignore[attr-defined,method-assign]


async def test_weights_that_cannot_be_had_again_are_told(recorded: Path, tmp_path: Path) -> None:
    """Comparing with other weights than those that generated would blame the engine."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    log.change(WEIGHTS, 2, digest="sha256-other")
    path = await record_altered(log, recorded, tmp_path / "other.rollstream")
    with pytest.raises(UserError, match="weights of version 1 cannot be had"):
        await diff.main(str(path), 0, None, 5, False)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_statistics_are_those_of_all_tokens_at_once(seed: int, samples: int, worst: int) -> None:
    """The naive twin keeps everything in memory."""
    random = np.random.default_rng(seed)
    mismatch = Mismatch(1e-4, worst)
    deltas, places, versions = [], [], []
    for number in range(samples):
        length = int(random.integers(1, 400))
        engine = random.normal(-2, 1, length)
        delta = random.normal(0, 1, length) * 10.0 ** random.integers(-9, 1, length)
        mask = random.random(length) < 0.7
        positions = np.flatnonzero(mask)
        tokens = random.integers(0, 70, length)
        mismatch.add(f"{number}-0", number % 2, tokens, positions, engine[mask], (engine + delta)[mask])
        deltas.append(((engine + delta) - engine)[mask])
        places.append(positions)
        versions.append(np.full(len(positions), number % 2))
    delta, position, version = np.concatenate(deltas), np.concatenate(places), np.concatenate(versions)
    size = np.abs(delta)
    assert mismatch.all.tokens == len(delta)
    if not len(delta):
        return
    assert mismatch.all.mean == pytest.approx(size.mean())
    assert mismatch.all.largest == size.max()
    assert mismatch.all.k3 == pytest.approx((np.exp(delta) - 1 - delta).mean(), abs=1e-12)
    assert mismatch.all.share_above == (size > 1e-4).mean()
    assert [o.difference for o in mismatch.offenders] == sorted(size, reverse=True)[:worst]
    for number, found in mismatch.by_version.items():
        assert (found.tokens, found.largest) == ((version == number).sum(), size[version == number].max(initial=0))
    bins = np.searchsorted(POSITIONS, position, side="right") - 1
    for at, found in mismatch.by_position.items():
        assert found.mean == pytest.approx(size[bins == POSITIONS.index(at)].mean())
    for share, told in mismatch.quantiles().items():
        exact = np.sort(size)[max(0, int(np.ceil(share * len(size))) - 1)]
        assert told == 0.0 if exact < 1e-10 else exact * 0.999 <= told <= exact * 1.07


def test_what_is_no_number_is_the_worst_of_all() -> None:
    """A trainer that computes NaN must not pass as equal."""
    mismatch = Mismatch(1e-4, 1)
    engine = np.array([-1.0, -1.0])
    mismatch.add("1-0", 0, np.array([5, 6]), np.array([0, 1]), engine, np.array([-1.0, np.nan]))
    assert mismatch.offenders[0].position == 1
    assert not judge(mismatch.all, load_recipe(RECIPE)).consistent


def test_the_tolerance_is_that_of_the_number_formats() -> None:
    """bfloat16 has 8 bits of mantissa; held to float32's bounds every run would be called broken."""
    recipe = load_recipe(RECIPE)
    assert tolerance_of(recipe) == FLOAT32
    assert tolerance_of(load_recipe(RECIPE, ["rollout.dtype=bfloat16"])) == BFLOAT16
    assert tolerance_of(load_recipe(RECIPE, ["trainer.autocast=bfloat16"])) == BFLOAT16
    off = Differences(tokens=10, total=0.05, largest=0.2)
    assert not judge(off, recipe).consistent
    assert judge(off, load_recipe(RECIPE, ["rollout.dtype=bfloat16"])).consistent
    kept = judge(off, load_recipe(RECIPE, ["rollout.on_update=keep"]))
    assert "cache of older weights" in kept.sentence
