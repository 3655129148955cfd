"""The metrics of a step: what each is, and those that come from samples, ages and times. No torch here.

What comes from tensors is summed up in `tally`. `METRICS` names everything that a `StepDone` may hold;
`docs/metrics.md` is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actors.trainer.advantages import zero_variance
from actors.trainer.credit import Credit
from actors.trainer.samples import TrainSample

Unit = Literal["", "tokens", "samples", "groups", "steps", "versions", "nats", "s", "CPU s", "tokens/s", "Unix s"]
When = Literal[
    "", "with process rewards", "with a critic", "with a reference", "if engine_tokens is not 0", "with several turns"
]


def of_samples(samples: Sequence[TrainSample], credit: Credit, useful: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Rewards, advantages and lengths of a batch's samples, of all ranks; all 0 without a sample.

    `useful` bool [B] are those with a gradient.
    """
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    advantages = np.array([a.mean() if len(a) else 0.0 for a in credit.advantages], dtype=np.float64)
    of_tokens = np.concatenate([np.zeros(0), *credit.advantages])
    groups = np.array([s.group_id for s in samples], dtype=np.int64)
    made = np.array([len(s.tokens) if s.versions is None else s.generated for s in samples], dtype=np.int64)
    told = np.array([len(s.tokens) for s in samples], dtype=np.int64) - made
    response = np.sort(made)
    prompt = np.array([len(s.prompt_tokens) for s in samples], dtype=np.int64)
    finished = sum(s.finish == "stop" for s in samples)
    earned = [float(s.token_rewards.sum(dtype=np.float64)) for s in samples if s.token_rewards is not None]
    optional = {"process_reward_mean": sum(earned) / len(samples)} if earned else {}
    if told.any() or any(s.sequences is not None for s in samples):
        turns = np.array([len(s.turn_ends) for s in samples], dtype=np.int64)
        optional |= {"turns_mean": _mean(turns), "observation_tokens": float(told.sum())}
    return optional | {
        "reward_mean": _mean(rewards),
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "reward_min": float(rewards.min(initial=np.inf)) if len(rewards) else 0.0,
        "reward_max": float(rewards.max(initial=-np.inf)) if len(rewards) else 0.0,
        "advantage_mean": _mean(advantages),
        "advantage_std": float(advantages.std()) if len(advantages) else 0.0,
        "advantage_abs": _mean(np.abs(advantages)),
        "advantage_min": float(of_tokens.min()) if len(of_tokens) else 0.0,
        "advantage_max": float(of_tokens.max()) if len(of_tokens) else 0.0,
        "samples": float(len(samples)),
        "samples_with_gradient": float(useful.sum()),
        "zero_variance_groups": float(len(np.unique(groups[zero_variance(credit.rewards, groups)]))),
        "response_length_mean": _mean(response),
        "response_length_min": float(response[0]) if len(response) else 0.0,
        "response_length_p95": float(response[-(-95 * len(response) // 100) - 1]) if len(response) else 0.0,
        "response_length_max": float(response[-1]) if len(response) else 0.0,
        "prompt_length_mean": _mean(prompt),
        "prompt_length_max": float(prompt.max(initial=0)),
        "finished_fraction": finished / max(len(samples), 1),
    }


def of_ages(staleness: npt.NDArray[np.int64]) -> dict[str, float]:
    """Age of the trained tokens in versions; `staleness` int64 [k]: so many tokens are i versions old."""
    ages = np.flatnonzero(staleness)
    tokens = int(staleness.sum())
    return {
        "staleness_min": float(ages.min(initial=ages[0])) if tokens else 0.0,
        "staleness_mean": float((staleness * np.arange(len(staleness))).sum()) / max(tokens, 1),
        "staleness_max": float(ages.max(initial=0)),
        "tokens_trained": float(tokens),
    }


@dataclass(frozen=True, slots=True)
class Wait:
    """When a trainer began to wait for a batch, when the batch came, and when its samples were there, all in seconds
    of the trainer's monotonic clock. It did not wait if the latter two are not after the first."""

    began: float
    arrived: float
    loaded: float

    def by_cause(self, last_rollout: float, last_verdict: float, formed: float) -> dict[str, float]:
        """Seconds waited for each; they sum up to the whole.

        The times are those at which the log stored the batch's last rollout, its last verdict and the batch itself, in
        seconds of the broker's clock; 0 if not known. The batch comes at once when a trainer waits for it, so `formed`
        and `arrived` are one moment, and the clocks need not agree.
        """
        marks = [self.arrived - max(0.0, formed - stored) for stored in (last_rollout, last_verdict)]
        at, out = self.began, {}
        for cause, until in zip(CAUSES, (*marks, self.arrived, self.loaded), strict=True):
            out[cause] = max(0.0, until - at)
            at = max(at, until)
        return out


CAUSES = ("generation", "reward", "controller", "loading")


def of_times(seconds: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Shares and rates; `seconds` by phase, "" is the whole step, `tokens` those trained in it."""
    whole = max(seconds["seconds"], 1e-9)
    return {"tokens_per_s": tokens / whole, "idle_fraction": min(1.0, seconds["seconds_waiting"] / whole)}


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, or the beginning of a family's, which ends in `/`; what it is, and over what.

    `when` it is told; empty: by every step.
    """

    name: str
    unit: Unit
    what: str
    over: str
    when: When = ""


_TOKENS = "tokens with a gradient"
_SAMPLES = "samples of the batch"
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward", "", "mean reward", "samples that ended since the last batch, filtered ones too"),
        Metric("reward_mean", "", "mean reward, as the function gave it", _SAMPLES),
        Metric("reward_std", "", "standard deviation, over n", _SAMPLES),
        Metric("reward_min", "", "least", _SAMPLES),
        Metric("reward_max", "", "largest", _SAMPLES),
        Metric("process_reward_mean", "", "mean of each sample's sum of process rewards", _SAMPLES,
               "with process rewards"),
        Metric("zero_variance_groups", "groups", "groups whose shaped rewards are all equal", "groups of the batch"),
        Metric("seen/", "", "the controller's account: samples, reward, response_length, response_length_max, "
               "zero_variance_groups, dropped/REASON; reward_digests, how many states of the reward function "
               "gave them, if it was changed since the batch before",
               "samples that ended since the last batch, filtered ones too"),
    ),
    "Advantages": (
        Metric("advantage_mean", "", "mean of the means of each sample's tokens", _SAMPLES),
        Metric("advantage_std", "", "standard deviation of the same, over n", _SAMPLES),
        Metric("advantage_abs", "", "mean of the absolute values of the same", _SAMPLES),
        Metric("advantage_min", "", "least", "trained tokens"),
        Metric("advantage_max", "", "largest", "trained tokens"),
    ),
    "Samples and lengths": (
        Metric("samples", "samples", "count", _SAMPLES + ", with at least one response token"),
        Metric("samples_with_gradient", "samples", "of these, what goes through the model: some advantage is not 0, or "
               "there is a critic, a KL or an entropy term", _SAMPLES),
        Metric("response_length_mean", "tokens", "mean; of what the policy made", _SAMPLES),
        Metric("response_length_min", "tokens", "least", _SAMPLES),
        Metric("response_length_p95", "tokens", "the smallest length that 95 % do not exceed", _SAMPLES),
        Metric("response_length_max", "tokens", "largest", _SAMPLES),
        Metric("turns_mean", "", "mean number of turns", _SAMPLES, "with several turns"),
        Metric("observation_tokens", "tokens", "count of what the policy was told between its turns, never trained",
               _SAMPLES, "with several turns"),
        Metric("prompt_length_mean", "tokens", "mean; of all its sequences together", _SAMPLES),
        Metric("prompt_length_max", "tokens", "largest", _SAMPLES),
        Metric("finished_fraction", "", "share that ended by itself and was not cut at max_new_tokens", _SAMPLES),
        Metric("response_tokens", "tokens", "count", "the policy's own tokens of the batch, trained or not"),
        Metric("tokens_trained", "tokens", "count", "response tokens in N: young enough, and a policy's own"),
        Metric("tokens_with_gradient", "tokens", "count", "trained tokens of the samples with a gradient"),
        Metric("tokens_packed", "tokens", "those that went through the model", "samples with a gradient"),
        Metric("padding_fraction", "", "share of the rows that is padding", "packed rows"),
    ),
    "Staleness": (
        Metric("staleness_min", "versions", "least of step − version(token)", "trained tokens"),
        Metric("staleness_mean", "versions", "mean of the same", "trained tokens"),
        Metric("staleness_max", "versions", "largest of the same; at most max_staleness", "trained tokens"),
        Metric("stale_masked_tokens", "tokens", "too old for the step, and masked", "the policy's own tokens"),
    ),
    "The policy": (
        Metric("loss", "", "mean over the optimizer steps of Σ loss / N", _TOKENS),
        Metric("entropy", "nats", "mean of H of the sampled-from distribution", _TOKENS),
        Metric("ratio_mean", "", "mean of the loss's ratio, such as exp(θ − prox)", _TOKENS),
        Metric("clip_fraction", "", "share for which the clipped branch of the loss was taken", _TOKENS),
        Metric("dual_clip_fraction", "", "the same of dual_clip", _TOKENS),
        Metric("prox_kl", "nats", "k3 of KL(anchor ‖ θ); the anchor is prox, or behav with a coupled loss", _TOKENS),
        Metric("reference_kl", "nats", "k3 of KL(θ ‖ reference)", _TOKENS, "with a reference"),
    ),
    "Off-policy": (
        Metric("behaviour_weight_mean", "", "mean of w, bounded; 0 where masked, 1 with a coupled loss", _TOKENS),
        Metric("behaviour_weight_max", "", "largest w, bounded", _TOKENS),
        Metric("behaviour_ratio_max", "", "largest exp(prox − behav), before any bound", _TOKENS),
        Metric("ess", "", "effective sample size (Σw)² / (n·Σw²), a share; of a coupled loss, of its ratio", _TOKENS),
        Metric("masked_fraction", "", "share that a correction, M2PO or OPSM masked or clamped", _TOKENS),
        Metric("mismatch_kl", "nats", "k3 of KL(behav ‖ prox): staleness and the engine's arithmetic together; with a "
               "coupled loss θ stands for prox", _TOKENS),
        Metric("engine_tokens", "tokens", "count", "tokens with a gradient that the engine made with the very weights "
               "that the step began with, where the trainer has logprobs under these: in all mini-batches if prox is "
               "computed, in the first else"),
        Metric("engine_mismatch_k1", "nats", "mean of behav − trainer: k1 of KL(engine ‖ trainer)", "engine_tokens",
               "if engine_tokens is not 0"),
        Metric("engine_mismatch_k3", "nats", "mean of k3 of the same", "engine_tokens", "if engine_tokens is not 0"),
        Metric("engine_mismatch_max", "nats", "largest |behav − trainer|", "engine_tokens",
               "if engine_tokens is not 0"),
    ),
    "The optimizer": (
        Metric("lr", "", "learning rate of the step's optimizer steps", ""),
        Metric("grad_norm", "", "mean global norm before clipping", "optimizer steps that were finite"),
        Metric("optimizer_steps", "steps", "taken", "mini-batches with a gradient"),
        Metric("skipped_steps", "steps", "not taken: the gradient was not finite", "mini-batches with a gradient"),
    ),
    "The critic": (
        Metric("value_loss", "", "mean", _TOKENS, "with a critic"),
        Metric("value_clip_fraction", "", "share for which the clipped branch was taken", _TOKENS, "with a critic"),
        Metric("explained_variance", "", "1 − Var(return − V) / Var(return), of V before the step", "trained tokens",
               "with a critic"),
        Metric("critic_lr", "", "learning rate", "", "with a critic"),
        Metric("critic_grad_norm", "", "as grad_norm", "", "with a critic"),
        Metric("critic_optimizer_steps", "steps", "as optimizer_steps", "", "with a critic"),
        Metric("critic_skipped_steps", "steps", "as skipped_steps", "", "with a critic"),
    ),
    "Time": (
        Metric("seconds", "s", "from the end of the step before, and of its checkpoint, until the new weights are "
               "published", "rank 0"),
        Metric("seconds_waiting", "s", "of these, with nothing to do", "rank 0"),
        Metric("seconds_waiting_generation", "s", "until the batch's last rollout was stored", "rank 0"),
        Metric("seconds_waiting_reward", "s", "from then until the batch's last verdict was stored", "rank 0"),
        Metric("seconds_waiting_controller", "s", "from then until the batch came", "rank 0"),
        Metric("seconds_waiting_loading", "s", "from then until its samples were fetched", "rank 0"),
        Metric("seconds_waiting_ranks", "s", "for the other ranks to have the batch", "rank 0"),
        Metric("idle_fraction", "", "seconds_waiting / seconds", "rank 0"),
        Metric("seconds_loading", "s", "fetching samples; beside the step before unless it is waited for", "rank 0"),
        Metric("seconds_training", "s", "the learner's step: the four below", "rank 0"),
        Metric("seconds_plan", "s", "reference, critic, credit, packing", "rank 0"),
        Metric("seconds_prox", "s", "forward of the weights before the step", "rank 0"),
        Metric("seconds_forward", "s", "forward and backward", "rank 0"),
        Metric("seconds_optimizer", "s", "sum of gradients over ranks, clipping, AdamW", "rank 0"),
        Metric("seconds_publishing", "s", "waiting until the weights before are announced, and copying the new ones",
               "rank 0"),
        Metric("seconds_announcing", "s", "encoding, writing and announcing the new weights, beside the next step",
               "rank 0"),
        Metric("seconds_checkpoint", "s", "the checkpoint written before this step, 0 if none was", "rank 0"),
        Metric("tokens_per_s", "tokens/s", "tokens_trained / seconds", "all ranks"),
        Metric("cpu_seconds", "CPU s", "of the process and its children, from the batch until weights are published",
               "rank 0"),
        Metric("time", "Unix s", "when the step was done", "rank 0"),
    ),
}  # fmt: skip
METRICS: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)


def described(name: str) -> Metric | None:
    """What a name in `StepDone.metrics` is; None if it is not in the table."""
    for metric in METRICS:
        if name == metric.name or (metric.name.endswith("/") and name.startswith(metric.name)):
            return metric
    return None


def as_markdown() -> str:
    """All metrics as tables, for `docs/metrics.md`."""
    out = []
    for group, metrics in GROUPS.items():
        out += [f"## {group}", "", "| name | unit | what | over |", "|---|---|---|---|"]
        for metric in metrics:
            what = f"{metric.what}; {metric.when}" if metric.when else metric.what
            cells = (f"`{metric.name}`" + ("…" if metric.name.endswith("/") else ""), metric.unit, what, metric.over)
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        out.append("")
    return "\n".join(out)
