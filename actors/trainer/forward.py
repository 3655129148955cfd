"""Log-probabilities of response tokens under a Hugging Face causal language model, on packed rows.

Shapes: R rows of L tokens; n = scored response tokens; S = sequences; V = vocabulary. Position t predicts
token t+1: the logprob of a response's first token comes from the last prompt position.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from actors.trainer.packing import Row
from schemas.errors import UserError
from schemas.trajectory import cuts

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """One sequence: prompt int32 [P], P ≥ 1; response int32 [T]; scored bool [T], which logprobs to compute."""

    prompt: npt.NDArray[np.int32]
    response: npt.NDArray[np.int32]
    scored: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def scored_sequences(
    prompt: npt.NDArray[np.int32],
    response: npt.NDArray[np.int32],
    scored: npt.NDArray[np.bool_],
    sequences: npt.NDArray[np.int32] | None,
) -> list[ScoredTokens]:
    """The sequences of a sample in their order, as its pairs `(prompt tokens, response tokens)` cut it up; one without.

    What a logprob is conditioned on is its own sequence, and nothing of those before.
    """
    if sequences is None or not len(sequences):
        return [ScoredTokens(prompt, response, scored)]
    places = cuts(sequences, len(prompt), len(response))
    return [ScoredTokens(prompt[of_prompt], response[part], scored[part]) for of_prompt, part in places]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. Scored tokens are flat, in the order of `sequences` and of position."""

    input_ids: Tensor  # int64 [R, L], 0 where padded
    position_ids: Tensor | None  # int64 [R, L], from 0 in each sequence; None: one sequence a row
    block: Tensor | None  # int32 [R, L], the sequence of each position, −1 where padded; None: one sequence a row
    predictors: Tensor  # int64 [n], in 0..R·L: where each scored token is predicted
    targets: Tensor  # int64 [n], the scored tokens
    ends: Tensor  # int64 [S], in 0..R·L: the last position of each of `sequences`
    sequence: Tensor  # int64 [n], each scored token's place in `sequences`
    sequences: tuple[int, ...]  # indices into the caller's sequences

    def attention_mask(self) -> Tensor | None:
        """bool [R, 1, L, L], True = attend; None: one sequence a row, plain causal.

        Made when it is asked for: it grows with the square of a row, and a step holds all its micro-batches at once.
        """
        if self.block is None:
            return None
        length = self.block.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.block.device).tril()
        return ((self.block[:, :, None] == self.block[:, None, :]) & causal)[:, None]


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a model allows, found out by trying it on a few tokens."""

    packs: bool  # a 4D mask and restarting positions keep neighbours in a row apart
    window: int | None  # tokens that a local attention layer sees; our mask would override it for longer sequences
    splits_head: bool  # logits are just the output head over the last hidden states (no scaling, no soft cap)

    def can_share_rows(self, longest: int) -> bool:
        """Whether sequences of at most `longest` tokens may share rows."""
        return self.packs and (self.window is None or longest <= self.window)


def collate(
    rows: Sequence[Row], sequences: Sequence[ScoredTokens], *, shared: bool, device: torch.device | str = "cpu"
) -> MicroBatch:
    """The tensors of one micro-batch. `shared` False means one sequence a row, without mask and positions."""
    R, L = len(rows), max(row.tokens for row in rows)
    input_ids = np.zeros((R, L), dtype=np.int64)
    position_ids = np.zeros((R, L), dtype=np.int64)
    block = np.full((R, L), -1, dtype=np.int32)  # padding attends to padding only, which keeps its softmax finite
    predictors, targets, ends, counts, order = [], [], [], [], []
    for r, row in enumerate(rows):
        start = 0
        for index in row.sequences:
            item = sequences[index]
            P, end = len(item.prompt), start + len(item)
            input_ids[r, start : start + P] = item.prompt
            input_ids[r, start + P : end] = item.response
            position_ids[r, start:end] = np.arange(end - start)
            block[r, start:end] = index
            scored = np.flatnonzero(item.scored)
            predictors.append(r * L + start + P - 1 + scored)
            targets.append(item.response[scored])
            ends.append(r * L + end - 1)
            counts.append(len(scored))
            order.append(index)
            start = end

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.asarray(array, dtype=np.int64)).to(device)

    return MicroBatch(
        input_ids=tensor(input_ids),
        position_ids=tensor(position_ids) if shared else None,
        block=torch.from_numpy(block).to(device) if shared else None,
        predictors=tensor(np.concatenate(predictors)),
        targets=tensor(np.concatenate(targets)),
        ends=tensor(np.array(ends)),
        sequence=tensor(np.repeat(np.arange(len(order)), counts)),
        sequences=tuple(order),
    )


def response_logprobs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    autocast: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(logits / temperature)` of each scored token, float32 [n], and by option the entropy of the
    distribution that it was drawn from, float32 [n], in nats, detached unless `entropy_gradient`.

    The output head runs only where a scored token is predicted: logits of prompt positions would dominate memory.
    Gradient mode is the caller's. `autocast` runs the model in that dtype; the softmax is float32 in any case.
    """
    arguments = model_inputs(model, micro_batch)
    with autocast_context(model, autocast):
        if model_traits(model).splits_head:
            hidden = model.base_model(**arguments).last_hidden_state
            head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            logits = head(hidden.flatten(0, 1).index_select(0, micro_batch.predictors))
        else:
            logits = model(**arguments).logits.flatten(0, 1).index_select(0, micro_batch.predictors)
    logits = logits.float()
    distribution = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    logprobs = distribution.gather(1, micro_batch.targets[:, None])[:, 0]
    if not entropy:
        return logprobs, None
    with nullcontext() if entropy_gradient else torch.no_grad():
        return logprobs, -(distribution.exp() * distribution).sum(-1)


_TRAITS: WeakKeyDictionary[PreTrainedModel, ModelTraits] = WeakKeyDictionary()


def model_traits(model: PreTrainedModel) -> ModelTraits:
    """What `model` allows, tried once per model object.

    Trying beats a list of architectures: recurrent layers leak between neighbours, relative biases ignore our
    positions, and several families scale or cap their logits under names of their own.
    """
    if model not in _TRAITS:
        training = model.training
        model.train(False)  # dropout would make any two passes differ
        with torch.no_grad():
            _TRAITS[model] = ModelTraits(_packs(model), _window(model), _splits_head(model))
        model.train(training)
    return _TRAITS[model]


def _packs(model: PreTrainedModel) -> bool:
    tokens = (np.arange(1, 10) % model.config.get_text_config().vocab_size).astype(np.int32)
    pair = [ScoredTokens(t[:1], t[1:], np.ones(len(t) - 1, dtype=np.bool_)) for t in (tokens[:4], tokens[4:])]
    together = collate([Row((0, 1), len(tokens))], pair, shared=True, device=model.device)
    try:
        packed: Tensor = model(**model_inputs(model, together)).logits
    except (TypeError, ValueError, RuntimeError) as error:  # no such argument, or no use for such a mask
        log.info("model_refused_shared_rows", model=type(model).__name__, reason=str(error))
        return False
    apart = [collate([Row((i,), len(s))], pair, shared=False, device=model.device) for i, s in enumerate(pair)]
    expected = torch.cat([model(**model_inputs(model, batch)).logits for batch in apart], dim=1)
    tolerance = torch.finfo(packed.dtype).eps ** 0.5 * float(expected.abs().max())
    return bool((packed - expected).abs().max() <= tolerance)


def model_inputs(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """The keyword arguments of a forward pass of `model`, or of its body."""
    arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    mask = batch.attention_mask()
    if mask is not None:
        arguments["attention_mask"] = _as_the_model_takes_it(model, mask)
        arguments["position_ids"] = batch.position_ids
    return arguments


def _window(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and all(kind == "full_attention" for kind in kinds):
        return None
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if size), default=None)


def _splits_head(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or model.base_model is model:
        return False
    input_ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return torch.equal(head(hidden), model(input_ids=input_ids, use_cache=False).logits)  # the same operations, or not


def _as_the_model_takes_it(model: PreTrainedModel, mask: Tensor) -> Tensor:
    """SDPA takes booleans (and bfloat16 queries only those); the eager path adds the mask to the scores."""
    if model.config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(model.dtype).min
    )


def autocast_context(model: PreTrainedModel, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to `dtype` on the model's device; None does nothing."""
    return nullcontext() if dtype is None else torch.autocast(model.device.type, dtype=dtype)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Have layers computed again for the backward pass, though the model is in eval mode, and stays without dropout.

    Raises `UserError` if the model has no layers that can.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} cannot compute its layers again for the backward pass.",
            "Set trainer.gradient_checkpointing to false.",
        )
    model_traits(model)  # tried in eval mode, which is put back afterwards, and then no more
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True  # the layer's own, which asks for this; what it holds is in eval mode
