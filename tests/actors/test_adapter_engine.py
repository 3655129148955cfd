"""An engine that is given adapters must be the policy that the trainer trains, whole at every moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Request, Sampling, WeightsError
from actors.rollout.torch_engine import Decoder
from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from bus.weights.tensors import to_bytes
from tests.actors.tiny_model import make_model, plain_logprobs
from tests.actors.tiny_models import samples

KINDS = ("qwen3", "llama", "gpt2")


def learner_of(model: PreTrainedModel, **changes: object) -> Learner:
    fields = {"lr": 1e-2, "minibatches": 2, "lora": {"rank": 4}} | changes
    return Learner(model, TrainerConfig(**fields))


class Versions:
    """Version 0 of a learner's model, and adapters over it as it is trained."""

    def __init__(self, learner: Learner, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.learner = learner
        self.dtype = dtype
        self.folder = folder
        self.version = 0
        self.base = self._write(learner.base_weights(dtype))

    def next(self) -> Path:
        self.learner.step(self.version, samples(seed=self.version))
        self.version += 1
        return self._write(self.learner.adapter(self.dtype))

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> Path:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{self.version}.safetensors"
        path.write_bytes(to_bytes(tensors))
        return path


def decoder_of(kind: str, **changes: object) -> Decoder:
    return Decoder(make_model(kind, seed=99), RolloutConfig(slots=4, **changes), version=-1)


def weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in decoder._model.state_dict().items()}


def answer(decoder: Decoder, max_new_tokens: int = 12) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    prompt = (3, 5, 7)
    decoder.add([Request("s", prompt, Sampling(max_new_tokens), seed=3)])
    while not (done := decoder.step()):
        pass
    ((_, generation),) = done
    return prompt, generation.logprobs, generation.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_an_adapter_reports_the_logprobs_of_the_trainer(kind: str, tmp_path: Path) -> None:
    """The trainer computes Wx + sBAx, the engine (W + sBA)x: the same to rounding."""
    versions = Versions(learner_of(make_model(kind)), tmp_path)
    decoder = decoder_of(kind)
    for version in range(1, 4):
        decoder.load(version, versions.next(), versions.base)
        prompt, logprobs, tokens = answer(decoder)
        assert logprobs == pytest.approx(plain_logprobs(versions.learner.model, prompt, tokens), abs=1e-4)


def test_adapters_leave_no_trace_of_each_other(tmp_path: Path) -> None:
    """Each is merged into the base, not into what the last one left: rounding would add up over a thousand versions."""
    versions = Versions(learner_of(make_model()), tmp_path)
    worker, late = decoder_of("qwen3"), decoder_of("qwen3")
    for version in range(1, 5):
        adapter = versions.next()
        worker.load(version, adapter, versions.base)
    late.load(4, adapter, versions.base)
    assert all(torch.equal(tensor, weights(late)[name]) for name, tensor in weights(worker).items())
    worker.load(5, versions.base)
    late.load(5, versions.base)
    assert all(torch.equal(tensor, weights(late)[name]) for name, tensor in weights(worker).items())
    worker.load(6, adapter, versions.base)  # after full weights the base is brought back whole
    assert (weights(worker)["model.norm.weight"] == versions.learner.model.model.norm.weight).all()


def test_an_adapter_of_other_targets_leaves_no_trace_of_the_last_one(tmp_path: Path) -> None:
    one = Versions(learner_of(make_model(), lora={"targets": "q_proj"}), tmp_path / "one")
    other = Versions(learner_of(make_model(), lora={"targets": ["up_proj", "down_proj"]}), tmp_path / "other")
    worker, late = decoder_of("qwen3"), decoder_of("qwen3")
    worker.load(1, one.next(), one.base)
    adapter = other.next()
    worker.load(2, adapter, one.base)
    late.load(2, adapter, one.base)
    assert all(torch.equal(tensor, weights(late)[name]) for name, tensor in weights(worker).items())


def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """Of another rank it fits; of another model, or cut short, it does not."""
    versions = Versions(learner_of(make_model()), tmp_path / "a")
    strange = Versions(learner_of(make_model("gpt2")), tmp_path / "b")
    decoder = decoder_of("qwen3")
    decoder.load(1, versions.next(), versions.base)
    before = weights(decoder)
    with pytest.raises(WeightsError, match="does not fit its base"):
        decoder.load(2, strange.next(), versions.base)
    with pytest.raises(WeightsError, match="holds no adapter"):
        decoder.load(2, versions.base, versions.base)
    torn = tmp_path / "torn.adapter"
    torn.write_bytes(versions.next().read_bytes()[:-9])
    with pytest.raises(WeightsError, match="holds no adapter"):
        decoder.load(2, torn, versions.base)
    assert decoder.version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(decoder).items())


def test_an_interrupted_answer_goes_on_under_the_adapter(tmp_path: Path) -> None:
    """Its cache is rebuilt, its tokens keep the version that made them."""
    versions = Versions(learner_of(make_model()), tmp_path)
    decoder = decoder_of("qwen3")
    decoder.load(0, versions.base)
    decoder.add([Request("s", (3, 5, 7), Sampling(40), seed=8)])
    for _ in range(3):
        assert not decoder.step()
    decoder.load(1, versions.next(), versions.base)
    while not (done := decoder.step()):
        pass
    ((_, generation),) = done
    assert generation.segments[0] == (0, 3)
    assert generation.segments[1][0] == 1
    expected = plain_logprobs(versions.learner.model, (3, 5, 7), generation.tokens)
    assert generation.logprobs[3:] == pytest.approx(expected[3:], abs=1e-4)
    assert generation.logprobs[:3] != pytest.approx(expected[:3], abs=1e-4)


def test_in_bfloat16_the_merged_weights_are_rounded_once(tmp_path: Path) -> None:
    versions = Versions(learner_of(make_model()), tmp_path, torch.bfloat16)
    decoder = Decoder(make_model("qwen3", seed=99).to(torch.bfloat16), RolloutConfig(slots=4, dtype="bfloat16"), -1)
    decoder.load(1, versions.next(), versions.base)
    for name, tensor in versions.learner.weights(torch.bfloat16).items():
        assert torch.equal(weights(decoder)[name], tensor)
