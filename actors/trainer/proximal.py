"""The proximal policy without a forward pass of its own: between the policy that sampled and the current one."""

import torch
from torch import Tensor

from actors.trainer.config import ProximalApproximation


def approximate(
    how: ProximalApproximation, behaviour: Tensor, current: Tensor, versions: Tensor, current_version: int
) -> Tensor:
    """Approximate logprobs [n] of version `current_version` − 1, detached.

    ```
    α = clamp((v_prox − v_b)/(v_θ − v_b), 0, 1), 0 if v_b < 0 or v_b ≥ v_θ;  v_prox = v_θ − 1
    loglinear:  behav + α·(θ − behav)
    linear:     log((1 − α)·exp(behav) + α·exp(θ))
    rollout:    behav
    ```
    `versions` int64 [n] is the policy version v_b of each token, below 0 where no policy made it; `current_version` is
    the version that this step makes, v_θ. A token of version v_θ − 1 has α = 0: it was sampled by the proximal policy.

    Source: AReaL's `prox_logp_method`.
    """
    theta = current.detach()
    if how == "rollout":
        return behaviour
    distance = (current_version - versions).to(theta.dtype)
    alpha = ((distance - 1) / distance.clamp(min=1)).clamp(0, 1)
    alpha = torch.where((versions < 0) | (distance <= 0), torch.zeros_like(alpha), alpha)
    if how == "loglinear":
        return behaviour + alpha * (theta - behaviour)
    return torch.logaddexp(torch.log1p(-alpha) + behaviour, alpha.log() + theta)
