"""What of the vLLM engine needs no vLLM: versions, stamps, seeds, and whether weights fit and were taken."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from actors.rollout import vllm_versions
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Generation, NonFiniteLogitsError, Request, Sampling, WeightsError
from actors.rollout.vllm_answer import Answer, joined, seed_of
from actors.rollout.vllm_worker import check_complete, probe, weights_at
from actors.rollout.weight_shapes import check_shapes, weight_shapes
from bus.adapter import A, Adapter, AdapterShape, B
from schemas import UserError

PREFIX = Generation("s", (5, 6), (7, 8, 9), (-0.1, -0.2, -0.3), ((2, 3),), None)


def request(prefix: Generation | None = None, seed: int = 0, **sampling: Any) -> Request:
    return Request("s", (5, 6), Sampling(50, **sampling), seed, prefix)


def logprobs(*values: float) -> list[Mapping[int, Any]]:
    """As vLLM gives them for tokens 10, 11, ..."""
    return [{10 + i: SimpleNamespace(logprob=value)} for i, value in enumerate(values)]


# ---- versions


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1.dev3+cpu"])
def test_a_supported_version_is_taken(version: str) -> None:
    vllm_versions.check_version(version)


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0", "0.3.2", "1.0"])
def test_another_version_is_refused_with_the_remedy(version: str) -> None:
    """It might do what we need, or nearly."""
    with pytest.raises(UserError, match=rf"vLLM {version} is installed; Rollstream knows 0.31.x, 0.32.x") as refused:
        vllm_versions.check_version(version)
    assert "pip install" in refused.value.remedy


def test_outputs_of_0_31_carry_no_stamps() -> None:
    assert vllm_versions.stamps(SimpleNamespace(token_ids=[1])) is None


def test_outputs_of_0_32_carry_their_stamps() -> None:
    spans = [SimpleNamespace(version="4", start=0, end=2)]
    assert vllm_versions.stamps(SimpleNamespace(token_ids=[1, 2], weight_versions=spans)) is spans


async def test_outputs_on_their_way_arrive_before_the_version_changes() -> None:
    """With 0.31 nothing else tells which weights a token is of: vLLM hands outputs on through a queue and a task."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    inner: asyncio.Queue[int] = asyncio.Queue()
    arrived: list[int] = []

    async def handler() -> None:
        while True:
            inner.put_nowait(await queue.get())

    async def caller() -> None:
        while True:
            arrived.append(await inner.get())

    tasks = [asyncio.create_task(handler()), asyncio.create_task(caller())]
    await asyncio.sleep(0)
    for number in range(300):
        queue.put_nowait(number)
    await vllm_versions.outputs_arrived(SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=queue)), slots=300)
    assert arrived == list(range(300))
    for task in tasks:
        task.cancel()


def test_arguments_follow_the_recipe_and_a_users_own_come_last() -> None:
    config = RolloutConfig.model_validate(
        {"engine": "vllm", "slots": 7, "vllm": {"tensor_parallel": 4, "kv_cache_gib": 0.5, "args": {"seed": 9}}}
    )
    on_gpu = vllm_versions.arguments(Path("m"), config, on_cpu=False)
    assert on_gpu["max_num_seqs"] == 7
    assert on_gpu["tensor_parallel_size"] == 4
    assert on_gpu["kv_cache_memory_bytes"] == 2**29
    assert on_gpu["seed"] == 9
    assert on_gpu["logprobs_mode"] == "processed_logprobs"
    assert not on_gpu["enforce_eager"]
    plain = RolloutConfig(engine="vllm")
    assert "kv_cache_memory_bytes" not in vllm_versions.arguments(Path("m"), plain, on_cpu=False)
    on_cpu = vllm_versions.arguments(Path("m"), plain, on_cpu=True)
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["block_size"], on_cpu["enforce_eager"]) == (2**30, 32, True)


# ---- one answer


def test_tokens_are_told_apart_by_the_cores_stamps_and_else_by_their_arrival() -> None:
    """The stamps come at the end; until then a snapshot goes by what was seen."""
    answer = Answer(request(PREFIX), version=2)
    answer.take([10], logprobs(-1.0))
    answer.updated(3)
    answer.take([10, 11], logprobs(-1.0, -2.0))
    assert answer.generation(None).segments == ((2, 4), (3, 2))
    answer.stamped([SimpleNamespace(version="2", start=0, end=2), SimpleNamespace(version="3", start=2, end=3)])
    done = answer.generation("stop")
    assert done.segments == ((2, 5), (3, 1))
    assert done.tokens == (7, 8, 9, 10, 10, 11)
    assert done.logprobs == (-0.1, -0.2, -0.3, -1.0, -1.0, -2.0)


def test_an_answer_can_be_looked_at_in_part_as_on_the_whole() -> None:
    answer = Answer(request(PREFIX), version=2)
    answer.take([10, 11], logprobs(-1.0, -2.0))
    whole = answer.generation(None).tokens
    assert answer.length == len(whole) == 5
    assert [answer.tokens_from(start) for start in range(7)] == [whole[start:] for start in range(7)]


def test_an_update_before_the_first_token_leaves_no_empty_segment() -> None:
    answer = Answer(request(), version=2)
    answer.updated(3)
    answer.updated(4)
    assert answer.generation(None).segments == ()
    answer.take([10], logprobs(-1.0))
    assert answer.generation(None).segments == ((4, 1),)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12), st.integers(0, 12))
def test_joined_runs_say_the_same_of_each_token(runs: list[tuple[int, int]], cut: int) -> None:
    """Against the naive list of each token's version."""
    told = joined(runs[:cut], runs[cut:])
    assert [v for v, n in told for _ in range(n)] == [v for v, n in runs for _ in range(n)]
    assert all(n > 0 for _, n in told)
    assert all(left[0] != right[0] for left, right in itertools.pairwise(told))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_no_number_fails_the_sample(bad: float) -> None:
    """A diverged policy must not be trained on."""
    with pytest.raises(NonFiniteLogitsError, match="diverged"):
        Answer(request(), version=0).take([10, 11], logprobs(-1.0, bad))


def test_a_greedy_choice_is_certain() -> None:
    answer = Answer(request(temperature=0.0), version=0)
    answer.take([10], logprobs(-0.7))
    assert answer.generation("stop").logprobs == (0.0,)


def test_a_resumed_sample_gets_another_stream_than_it_began_with() -> None:
    """With the same it would repeat its first numbers."""
    seeds = {seed_of(request(seed=seed)) for seed in range(50)}
    seeds |= {seed_of(request(replace(PREFIX, tokens=(7,) * n), seed=seed)) for seed in range(50) for n in (1, 2)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(request(seed=-1)) == seed_of(request(seed=2**64 - 1))
    assert seed_of(request(PREFIX, seed=4)) == seed_of(request(PREFIX, seed=4))


# ---- weights


def test_shapes_are_read_from_a_file_and_from_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors", metadata={"x": "y"})
    save_file({"b": torch.zeros(4)}, tmp_path / "2.safetensors")
    assert weight_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert weight_shapes(tmp_path / "1.safetensors") == {"a": (2, 3)}


BROKEN = {
    "gone": None,
    "empty": b"",
    "of another kind": b"\xff" * 64,
    "a list": b"\x02\0\0\0\0\0\0\0[]",
    "cut short": b"\x09\0\0\0\0\0\0\0{",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"w\.safetensors"):
        weight_shapes(tmp_path / "w.safetensors")


def test_only_a_tied_head_may_be_left_out_or_repeated() -> None:
    model = {"a": (2, 3), "lm_head.weight": (5, 2)}
    check_shapes(model, {"a": (2, 3)})
    check_shapes({"a": (2, 3)}, model)
    for given_shapes, why in (
        ({"b": (2, 3)}, "missing: a"),
        ({"a": (2, 3), "b": (1,)}, "unknown: b"),
        ({"a": (3, 2)}, "of another shape"),
    ):
        with pytest.raises(WeightsError, match=why):
            check_shapes(model, given_shapes)


class FakeModel(torch.nn.Module):
    """As vLLM makes it: q, k and v are one parameter, the vocabulary is padded."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012  (as vLLM has it)

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        qkv = torch.cat([parts[f"attn.{part}_proj.weight"] for part in "qkv"])
        self.attn = torch.nn.Module()
        self.attn.qkv_proj = torch.nn.Linear(4, 8)
        self.attn.qkv_proj.weight = torch.nn.Parameter(qkv)
        self.attn.qkv_proj.bias = None
        self.embed = torch.nn.Embedding(16, 4)
        self.embed.weight.data[:10] = parts["embed.weight"]


def parts() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"attn.q_proj.weight": 4, "attn.k_proj.weight": 2, "attn.v_proj.weight": 2, "embed.weight": 10}
    return {name: torch.randn(rows, 4) for name, rows in shapes.items()}


def test_a_probe_finds_what_was_not_taken() -> None:
    """vLLM may pack weights elsewhere and load into nothing, without a word."""
    assert probe(FakeModel(parts()), parts()) == 2
    for name in parts():
        stale = FakeModel(parts() | {name: parts()[name] + 0.01})
        with pytest.raises(WeightsError, match="is not what was loaded"):
            probe(stale, parts())


def test_a_parameter_that_nobody_loaded_is_found() -> None:
    model = FakeModel(parts())
    check_complete(model, {"attn.qkv_proj.weight", "embed.weight"})
    check_complete(model, None)
    with pytest.raises(WeightsError, match=r"embed\.weight"):
        check_complete(model, {"attn.qkv_proj.weight"})


def test_an_adapter_is_merged_over_its_base(tmp_path: Path) -> None:
    """Into what it targets, in float32; the rest is the base's."""
    save_file(parts(), tmp_path / "base.safetensors")
    shape = AdapterShape(1, 2.0, 2.0, ("attn.k_proj",))
    adapter = Adapter({"attn.k_proj" + A: torch.ones(1, 4), "attn.k_proj" + B: torch.ones(2, 1)}, shape)
    metadata = {"rollstream": json.dumps({"adapter": adapter.describe()})}
    save_file(dict(adapter), tmp_path / "1.safetensors", metadata=metadata)
    merged, under = weights_at(str(tmp_path / "1.safetensors"), str(tmp_path / "base.safetensors"))
    wanted = parts() | {"attn.k_proj.weight": parts()["attn.k_proj.weight"] + 2.0}
    assert under == (str(tmp_path / "base.safetensors"), ("attn.k_proj",))
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in wanted.items())
    assert list(merged.targeted()) == ["attn.k_proj.weight"]
    assert probe(FakeModel(wanted), merged.targeted()) == 2


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_file(parts(), tmp_path / "base.safetensors")
    with pytest.raises(WeightsError, match="holds no adapter"):
        weights_at(str(tmp_path / "base.safetensors"), str(tmp_path / "base.safetensors"))
