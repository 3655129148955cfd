"""Small random models and samples for the trainer's tests."""

import random
from dataclasses import replace

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.trainer.samples import TrainSample

VOCABULARY = 31


def qwen3(seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    rest = {"max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0}
    return Qwen3ForCausalLM(Qwen3Config(**(sizes | heads | rest | changes))).eval()


def llama(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | changes))).eval()


def gpt2(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    ids = {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**(sizes | ids | changes))).eval()


def samples(groups: int = 4, size: int = 4, seed: int = 0, longest: int = 20) -> list[TrainSample]:
    """Groups of random samples with both rewards in each group, some tokens masked, behaviour a little off."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = rng.integers(1, VOCABULARY, rng.integers(1, 9)).astype(np.int32)
        for index in range(size):
            T = int(rng.integers(1, longest))
            mask = rng.random(T) < 0.9
            mask[-1] = True
            made.append(
                TrainSample(
                    sample_id=f"g{group}-{index}",
                    group_id=group,
                    prompt_tokens=prompt,
                    tokens=rng.integers(1, VOCABULARY, T).astype(np.int32),
                    behaviour_logprobs=rng.normal(-3.4, 0.3, T).astype(np.float32),
                    loss_mask=mask,
                    reward=float(index % 2),
                )
            )
    random.Random(seed).shuffle(made)
    return made


def trajectories(groups: int = 4, size: int = 4, seed: int = 0, longest: int = 24) -> list[TrainSample]:
    """The same with several turns: what the policy was told stands between them, and some are cut up into sequences.

    Rewards stand at the ends of turns, in half of the samples. Some turns were asked in another order.
    """
    rng, order = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    made = []
    for s in samples(groups, size, seed, longest):
        T = len(s.tokens)
        told = np.repeat(rng.random(T) < 0.4, rng.integers(1, 4, T))[:T]
        told[-1] = False
        count = int(rng.integers(1, min(T, 4) + 1))
        ends = np.sort(rng.choice(np.arange(1, T), count - 1, replace=False)) if count > 1 else np.zeros(0, np.int64)
        tokens = np.diff(np.concatenate([[0], ends, [T]]))
        prompts = rng.integers(1, 6, count)
        pairs = np.stack([prompts, tokens], axis=1).reshape(-1).astype(np.int32)
        mask = s.loss_mask & ~told
        if count > 1 and rng.random() < 0.4 and mask[: -tokens[-1]].any():
            mask[-tokens[-1] :] = False  # nothing of the last sequence is trained
        cut_up = replace(
            s,
            prompt_tokens=rng.integers(1, VOCABULARY, prompts.sum()).astype(np.int32),
            behaviour_logprobs=np.where(told, 0, s.behaviour_logprobs).astype(np.float32),
            loss_mask=mask,
            versions=np.where(told, -1, 3).astype(np.int32),
            sequences=pairs if count > 1 else None,
            finish="length" if rng.random() < 0.3 else "stop",
        )
        if rng.random() < 0.5:
            ends = cut_up.turn_ends.astype(np.int32)
            at_end = np.isin(np.arange(T), ends)
            earned = np.where(at_end, np.round(rng.normal(size=T)), 0).astype(np.float32)
            cut_up = replace(cut_up, token_rewards=earned, step_ends=ends)
        if count > 1 and order.random() < 0.7:
            lasts = cut_up.turn_ends
            asked = np.stack([lasts, order.permutation(len(lasts))], axis=1).reshape(-1).astype(np.int32)
            cut_up = replace(cut_up, asked=asked)
        made.append(cut_up)
    return made
