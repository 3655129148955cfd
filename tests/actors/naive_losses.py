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
