"""All that is known of particular vLLM versions: which are supported, how one is started, and what differs.

The rest of the engine keeps to what every supported version has: `AsyncEngineArgs`, `AsyncLLM.from_engine_args`,
`generate`, `abort`, `pause_generation(mode="keep")`, `resume_generation`, `collective_rpc` by name,
`update_weight_version`, `check_health`, `shutdown`.

| version | what differs |
|---|---|
| 0.31 | its core knows the weight version, but its outputs do not tell it: tokens are told apart by their arrival |
| 0.32 | a finished output says which tokens were made under which version |
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

from actors.rollout.config import RolloutConfig
from schemas import UserError

SUPPORTED = ("0.31", "0.32")  # the tests pass with each, on a CPU
INSTALL = (
    "On a GPU: pip install 'rollstream[vllm]'. On a CPU: pip install the list in tests/vllm/requirements.txt. "
    "Or use the built-in engine: rollout.engine=torch."
)
EXTENSION = "actors.rollout.vllm_worker.WeightLoader"
OWNER = "ROLLSTREAM_ENGINE_OWNER"  # environment variable: the process that vLLM's processes must not outlive
LOOP_TURNS = 4  # from vLLM's queue of outputs to the caller of `generate`
OUTPUTS_A_TURN = 128  # that vLLM hands on before it lets others run
CPU_KV_CACHE_GIB = 1.0
CPU_BLOCK_TOKENS = 32  # its attention wants a multiple; the default of 128 would share little of a short prompt


def check_installed() -> None:
    """Raises `UserError` if there is no vLLM here."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.engine is vllm, but vLLM is not installed.", INSTALL)


def check_version(version: str) -> None:
    """Raises `UserError` for a version whose behaviour is unknown."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise UserError(
            f"vLLM {version} is installed; Rollstream knows {', '.join(f'{known}.x' for known in SUPPORTED)}.", INSTALL
        )


def set_environment(config: RolloutConfig) -> None:
    """What vLLM reads from the environment when it is imported and when it starts its processes."""
    os.environ[OWNER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several engines share the cores
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def arguments(model: Path, config: RolloutConfig, on_cpu: bool) -> dict[str, Any]:
    """Of `AsyncEngineArgs`, for the model folder `model`."""
    vllm = config.vllm
    cache_gib = CPU_KV_CACHE_GIB if on_cpu and vllm.kv_cache_gib is None else vllm.kv_cache_gib
    chosen: dict[str, Any] = {
        "model": str(model),
        "dtype": config.dtype,
        "tensor_parallel_size": vllm.tensor_parallel,
        "max_num_seqs": config.slots,
        "enforce_eager": on_cpu if vllm.enforce_eager is None else vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution drawn from; the default ignores temperature
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's own defaults for sampling must not mix with the recipe's
        "worker_extension_cls": EXTENSION,
        "enable_log_requests": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    if vllm.max_model_len is not None:
        chosen["max_model_len"] = vllm.max_model_len
    if cache_gib is not None:
        chosen["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    if on_cpu:
        chosen["block_size"] = CPU_BLOCK_TOKENS
    return chosen | vllm.args


def start(model: Path, config: RolloutConfig) -> Any:
    """A running `AsyncLLM`; takes seconds to minutes. Raises `UserError` for what the recipe has wrong."""
    check_installed()
    set_environment(config)
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    check_version(vllm.__version__)
    chosen = arguments(model, config, current_platform.is_cpu())
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(chosen.keys() - known):
        raise UserError(
            f"rollout.vllm.args has {', '.join(unknown)}, which vLLM {vllm.__version__} does not know.",
            "See the fields of vllm.AsyncEngineArgs.",
        )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))


def stamps(made: Any) -> list[Any] | None:
    """Which tokens of a finished `CompletionOutput` are of which version, as its core says; None if it does not."""
    return getattr(made, "weight_versions", None)


async def outputs_arrived(llm: Any, slots: int) -> None:
    """Return when all outputs that the core sent before it answered the last call are with their `generate` calls.

    The answer to a call overtakes outputs that were sent before it, on their last steps through the loop.
    """
    while not llm.engine_core.outputs_queue.empty():
        await asyncio.sleep(0)
    for _ in range(LOOP_TURNS + slots // OUTPUTS_A_TURN):
        await asyncio.sleep(0)


def prepare_worker() -> None:
    """What a CPU build needs before its model is built. Called in vLLM's worker process; elsewhere it changes nothing.

    Linear layers are packed for the CPU and their weights emptied, so that new weights could not be loaded into them,
    or would be loaded and not used (a tied output head). They are left as they are, for 10 to 30 % of their speed.
    Machines with AMX end bfloat16 models with SIGILL unless it was initialised.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as layers

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    layers.dispatch_cpu_unquantized_gemm = _keep_plain


def _keep_plain(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear
