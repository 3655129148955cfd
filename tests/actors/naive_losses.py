"""Every loss spelled out token by token in float64, without torch: the oracle of the fast ones.

Each takes θ twice: `theta` moves, `held` is where gradients are stopped. So central differences in `theta` give the
gradient that is meant, of losses too that stop a gradient.
"""

import math

import numpy as np


def groups(sequence):
    return [np.flatnonzero(sequence == s) for s in np.unique(sequence)]


def ppo(theta, held, x, clip=0.2, clip_high=None, dual_clip=None):
    total = 0.0
    for t in range(len(theta)):
        total += x["weight"][t] * surrogate(theta[t] - x["proximal"][t], x["advantages"][t], clip, clip_high, dual_clip)
    return total


def surrogate(log_ratio, advantage, clip, clip_high, dual_clip):
    u = math.exp(log_ratio)
    bounded = min(max(u, 1 - clip), 1 + (clip if clip_high is None else clip_high))
    loss = max(-advantage * u, -advantage * bounded)
    return min(loss, dual_clip * abs(advantage)) if dual_clip is not None and advantage < 0 else loss


def gspo(theta, held, x, clip=0.2, clip_high=None, dual_clip=None):
    total = 0.0
    for members in groups(x["sequence"]):
        log_ratio = sum(theta[t] - x["proximal"][t] for t in members) / len(members)
        advantage = sum(x["advantages"][t] for t in members) / len(members)
        total += sum(x["weight"][members]) * surrogate(log_ratio, advantage, clip, clip_high, dual_clip)
    return total


def gate(r, advantage, positive, negative):
    tau = positive if advantage > 0 else negative
    return 4 / tau / (1 + math.exp(-tau * (r - 1)))


def sapo(theta, held, x, positive=1.0, negative=1.05):
    total = 0.0
    for t in range(len(theta)):
        r, advantage = math.exp(theta[t] - x["behaviour"][t]), x["advantages"][t]
        total -= x["weight"][t] * gate(r, advantage, positive, negative) * advantage
    return total


def sapo_sequence(theta, held, x, positive=1.0, negative=1.05):
    total = 0.0
    for members in groups(x["sequence"]):
        r = math.exp(sum(theta[t] - x["behaviour"][t] for t in members) / len(members))
        advantage = sum(x["advantages"][t] for t in members) / len(members)
        total -= sum(x["weight"][members]) * gate(r, advantage, positive, negative) * advantage
    return total


def cispo(theta, held, x, clip_high=0.2):
    total = 0.0
    for t in range(len(theta)):
        r = math.exp(held[t] - x["behaviour"][t])
        total -= x["weight"][t] * min(r, 1 + clip_high) * x["advantages"][t] * theta[t]
    return total


def reinforce(theta, held, x):
    return -sum(x["weight"][t] * x["advantages"][t] * theta[t] for t in range(len(theta)))


def value(theta, held, x, clip=0.5, kind="mse", huber_delta=10.0):
    def distance(d):
        return d * d / 2 if kind == "mse" or abs(d) <= huber_delta else huber_delta * (abs(d) - huber_delta / 2)

    total = 0.0
    for t in range(len(theta)):
        old, target = x["proximal"][t], x["behaviour"][t]
        bounded = theta[t] if clip is None else min(max(theta[t], old - clip), old + clip)
        total += max(distance(theta[t] - target), distance(bounded - target))
    return total


def kl(theta, held, x, estimator="k3"):
    total = 0.0
    for t in range(len(theta)):
        d = theta[t] - x["behaviour"][t]
        estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        total += min(max(estimate, -10), 10)
    return total


def central_differences(loss, theta, x, step=1e-6, **arguments):
    gradient = np.zeros(len(theta))
    for t in range(len(theta)):
        up, down = theta.copy(), theta.copy()
        up[t] += step
        down[t] -= step
        gradient[t] = (loss(up, theta, x, **arguments) - loss(down, theta, x, **arguments)) / (2 * step)
    return gradient


def second_moment_mask(proximal, behaviour, threshold):
    """Masks one token after the other, the furthest off first, until the mean of the rest is below the threshold."""
    keep = np.ones(len(proximal), bool)
    squares = (behaviour - proximal) ** 2
    for worst in np.argsort(-squares, kind="stable"):
        if not keep.any() or squares[keep].mean() < threshold:
            break
        keep[worst] = False
    return keep


def off_policy_sequences(x, threshold):
    drop = np.zeros(len(x["advantages"]), bool)
    for members in groups(x["sequence"]):
        divergence = np.mean([x["behaviour"][t] - x["proximal"][t] for t in members])
        for t in members:
            drop[t] = x["advantages"][t] < 0 and divergence > threshold
    return drop


def gae(rewards, values, mask, last, discount, gae_lambda):
    """The advantage of each trained token as a sum over those behind it; masked ones are not there at all."""
    out = np.zeros(len(rewards))
    for t in range(len(rewards)):
        places = [s for s in range(t, len(rewards)) if mask[s]]
        following = [*(values[s] for s in places[1:]), last]
        out[t] = sum(
            (discount * gae_lambda) ** k * (rewards[s] + discount * following[k] - values[s])
            for k, s in enumerate(places)
        )
    return out


def behaviour_weight(proximal, behaviour, sequence, config):
    """The weight of each token, and whether it was changed."""
    weight, changed = np.zeros(len(proximal)), np.zeros(len(proximal), bool)
    for members in groups(sequence):
        d = {t: proximal[t] - behaviour[t] for t in members}
        of_token = {
            t: {"ratio": v, "k1": v, "k2": v * v / 2, "k3": math.exp(-v) - 1 + v}[config.metric] for t, v in d.items()
        }
        of_sequence = {"sum": sum, "mean": np.mean, "max": max}[config.aggregate](list(of_token.values()))
        for t in members:
            metric = of_sequence if config.level == "sequence" else of_token[t]
            raw = math.exp(d[t])
            if config.metric == "ratio":
                metric = math.exp(metric)
                raw = math.exp(np.mean(list(d.values()))) if config.level == "sequence" else raw
            low, high = config.lower, config.upper
            outside = (low is not None and metric < low) or (high is not None and metric > high)
            if config.action == "mask":
                weight[t], changed[t] = (0.0 if outside else raw), outside
            else:
                weight[t] = min(max(raw, -math.inf if low is None else low), math.inf if high is None else high)
                changed[t] = weight[t] != raw
    return weight, changed


def approximate(how, behaviour, theta, versions, current_version):
    out = behaviour.copy()
    for t in range(len(out)):
        if how == "rollout" or versions[t] < 0 or versions[t] >= current_version:
            continue
        alpha = (current_version - 1 - versions[t]) / (current_version - versions[t])
        if how == "loglinear":
            out[t] += alpha * (theta[t] - behaviour[t])
        else:
            out[t] = math.log((1 - alpha) * math.exp(behaviour[t]) + alpha * math.exp(theta[t]))
    return out


LOSSES = {
    "decoupled_ppo": ppo, "ppo": ppo, "gspo": gspo, "sapo": sapo, "sapo_sequence": sapo_sequence, "cispo": cispo,
    "reinforce": reinforce,
}  # fmt: skip


def of_logits(logits, targets):
    """Logprob of each target, and entropy of each distribution."""
    logprobs, entropies = [], []
    for row, target in zip(logits, targets, strict=True):
        log_sum = math.log(sum(math.exp(v) for v in row))
        logprobs.append(row[target] - log_sum)
        entropies.append(-sum(math.exp(v - log_sum) * (v - log_sum) for v in row))
    return np.array(logprobs), np.array(entropies)


def objective(logits, held, x, config, current_version):
    """Policy loss under correction and masks, KL penalty and entropy bonus, of `logits` [n, V]."""
    theta, entropy = of_logits(logits, x["targets"])
    stopped, _ = of_logits(held, x["targets"])
    coupled = config.loss in ("ppo", "sapo", "sapo_sequence", "cispo")
    proximal = x["proximal"]
    if config.proximal != "recompute" and not coupled:
        proximal = approximate(config.proximal, x["behaviour"], stopped, x["versions"], current_version)
    weight, _ = behaviour_weight(proximal, x["behaviour"], x["sequence"], config.behaviour_weight)
    weight = np.ones(len(theta)) if coupled else weight
    given = {**x, "proximal": proximal}
    if config.opsm_threshold is not None:
        weight = np.where(off_policy_sequences(given, config.opsm_threshold), 0.0, weight)
    given["weight"] = weight * x["keep"] * x["scale"]
    given["proximal"] = x["behaviour"] if coupled else proximal
    high = config.clip if config.clip_high is None else config.clip_high
    arguments = {
        "decoupled_ppo": {"clip": config.clip, "clip_high": high, "dual_clip": config.dual_clip},
        "sapo": dict(zip(("positive", "negative"), config.sapo_tau, strict=True)),
        "cispo": {"clip_high": high},
        "reinforce": {},
    }
    arguments |= {"ppo": arguments["decoupled_ppo"], "gspo": arguments["decoupled_ppo"]}
    arguments |= {"sapo_sequence": arguments["sapo"]}
    total = LOSSES[config.loss](theta, stopped, given, **arguments[config.loss])
    for t in range(len(theta)):
        d = theta[t] - x["reference"][t]
        penalty = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl.estimator]
        total += x["scale"][t] * (config.kl.coef * min(max(penalty, -10), 10) - config.entropy_coef * entropy[t])
    return total
