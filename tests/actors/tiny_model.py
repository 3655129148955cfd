"""Small random language models made on the spot, and the slow, plain way to ask them for logprobs."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from actors.rollout.engine import Generation

VOCAB = 40
CONTEXT = 96

_COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_ROTARY = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}
_LEARNED = {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.2}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_ROTARY, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**_ROTARY),
    "mistral": MistralConfig(**_ROTARY, sliding_window=24),
    "gpt2": GPT2Config(**_LEARNED),
    "gptj": GPTJConfig(**_LEARNED, rotary_dim=4),  # knows no SDPA: decodes with its own attention
}


def make_model(kind: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """The same kind and seed give the same float32 weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def save_weights(path: Path, kind: str = "qwen3", seed: int = 0) -> Path:
    """The weights of `make_model(kind, seed)` in one safetensors file, tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in make_model(kind, seed).state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    save_file(tensors, path)
    return path


def plain_logprobs(model: PreTrainedModel, prompt: Iterable[int], tokens: Iterable[int]) -> list[float]:
    """Log-probability of each of `tokens` after what precedes it, by one full forward pass without a cache."""
    prompt, tokens = list(prompt), list(tokens)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def segment_logprobs(models: dict[int, PreTrainedModel], generation: Generation) -> list[float]:
    """The plain logprobs of a generation's tokens, each under the version that its segment names."""
    expected: list[float] = []
    for version, count in generation.segments:
        all_logprobs = plain_logprobs(models[version], generation.prompt_tokens, generation.tokens)
        expected += all_logprobs[len(expected) : len(expected) + count]
    return expected
