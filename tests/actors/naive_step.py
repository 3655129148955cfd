"""A whole training step spelled out: one unpacked forward a sample, loops over sequences, plain autograd and AdamW.

The oracle of the learner, whose packing, micro-batches and flat scatters must not change what is learned.
"""

import copy

import numpy as np
import torch

from actors.trainer.config import COUPLED_LOSSES
from actors.trainer.credit import Values, assign


def alone(model, sample, temperature=1.0):
    """Logits [T, V] of one unpadded, unpacked response, in the model's own precision."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.tokens])).long()
    return torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)[len(sample.prompt_tokens) - 1 : -1]


def logprobs_of(model, sample):
    """Logprobs [m] of the trained tokens."""
    return alone(model, sample).gather(1, torch.from_numpy(sample.tokens).long()[:, None])[sample.loss_mask, 0]


class NaiveLearner:
    """`step` as `Learner.step`, for the losses and options that the tests name."""

    def __init__(self, model, config, max_new_tokens=20):
        self.model, self.config, self.max_new_tokens = copy.deepcopy(model), config, max_new_tokens
        self.reference = copy.deepcopy(model)
        self.adam = self._adam(self.model.parameters())
        self.trunk = copy.deepcopy(model.base_model)
        self.head = torch.zeros(model.config.hidden_size + 1, requires_grad=True)
        self.critic_adam = self._adam([*self.trunk.parameters(), self.head])
        self.losses = []

    def _adam(self, parameters):
        c = self.config
        return torch.optim.AdamW(parameters, lr=c.lr, betas=c.betas, eps=c.adam_eps, weight_decay=c.weight_decay)

    def values(self, s):
        ids = torch.from_numpy(np.concatenate([s.prompt_tokens, s.tokens])).long()
        hidden = self.trunk(input_ids=ids[None]).last_hidden_state[0]
        values = hidden @ self.head[:-1] + self.head[-1]
        return values[len(s.prompt_tokens) - 1 : -1][torch.from_numpy(s.loss_mask)], values[-1]

    def step(self, step, samples):
        c = self.config
        ordered = sorted(samples, key=lambda s: (s.group_id, s.sample_id))
        with torch.no_grad():
            prox = {s.sample_id: logprobs_of(self.model, s) for s in ordered}
            ref = {s.sample_id: logprobs_of(self.reference, s) for s in ordered}
            old = {s.sample_id: self.values(s) for s in ordered}
        penalties = values = None
        if c.kl.coef and c.kl.place == "reward":
            x = [torch.from_numpy(s.behaviour_logprobs[s.loss_mask]) - ref[s.sample_id] for s in ordered]
            penalties = [{"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[c.kl.estimator].numpy() for d in x]
        if c.critic is not None:
            values = Values(
                [old[s.sample_id][0].numpy() for s in ordered], np.array([float(old[s.sample_id][1]) for s in ordered])
            )
        credit = assign(ordered, c, max_new_tokens=self.max_new_tokens, reference_kl=penalties, values=values)
        order = np.random.default_rng((c.seed, step)).permutation(len(ordered))
        for members in np.array_split(order, c.minibatches):
            total = self._loss(step, [ordered[i] for i in members], [credit.advantages[i] for i in members], prox, ref)
            self._update(self.adam, total)
            self.losses.append(float(total.detach()))
            if c.critic is not None:
                self._update(self.critic_adam, self._value_loss(members, ordered, credit, old))

    def _update(self, adam, total):
        adam.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_([p for g in adam.param_groups for p in g["params"]], self.config.grad_clip)
        adam.step()

    def _value_loss(self, members, ordered, credit, old):
        c, total = self.config.critic, 0.0
        for i in members:
            v, before = self.values(ordered[i])[0], old[ordered[i].sample_id][0]
            target = torch.from_numpy(credit.returns[i]).float()
            bounded = before + (v - before).clamp(-c.clip, c.clip)
            total = total + torch.maximum((v - target) ** 2 / 2, (bounded - target) ** 2 / 2).sum()
        return total / sum(int(ordered[i].loss_mask.sum()) for i in members)

    def _loss(self, step, made, advantages, prox, ref):
        c = self.config
        N, S = sum(int(s.loss_mask.sum()) for s in made), len(made)
        keep = self._second_moment(made, advantages, prox)
        total = 0.0
        for s, advantage in zip(made, advantages, strict=True):
            distribution = alone(self.model, s)[torch.from_numpy(s.loss_mask)]
            theta = logprobs_of(self.model, s)
            b = torch.from_numpy(s.behaviour_logprobs[s.loss_mask])
            A = torch.from_numpy(advantage).float()
            p = self._proximal(step, s, prox[s.sample_id], b, theta.detach())
            per_token = self._policy_loss(theta, p, b, A) * keep[s.sample_id]
            if c.opsm_threshold is not None:
                of = theta.detach() if c.loss in COUPLED_LOSSES else p
                per_token = per_token * ~((A < 0) & ((b - of).mean() > c.opsm_threshold))
            if c.kl.coef and c.kl.place == "loss":
                d = theta - ref[s.sample_id]
                per_token = per_token + c.kl.coef * {"k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[c.kl.estimator]
            per_token = per_token - c.entropy_coef * -(distribution.exp() * distribution).sum(-1)
            weight = {
                "token_mean": 1 / N,
                "sequence_mean": 1 / S / len(theta),
                "constant": 1 / S / self.max_new_tokens,
            }
            total = total + weight[c.aggregation] * per_token.sum()
        return total

    def _second_moment(self, made, advantages, prox):
        out = {s.sample_id: torch.ones(int(s.loss_mask.sum())) for s in made}
        if self.config.m2po_threshold is None:
            return out
        squares = {
            (s.sample_id, t): float(d**2)
            for s, advantage in zip(made, advantages, strict=True)
            if advantage.any()
            for t, d in enumerate(torch.from_numpy(s.behaviour_logprobs[s.loss_mask]) - prox[s.sample_id])
        }
        rest = dict(squares)
        for (sample_id, t), _ in sorted(squares.items(), key=lambda item: -item[1]):
            if not rest or np.mean(list(rest.values())) < self.config.m2po_threshold:
                break
            del rest[sample_id, t]
            out[sample_id][t] = 0.0
        return out

    def _proximal(self, step, s, p, b, theta):
        if self.config.proximal == "recompute":
            return p
        if self.config.proximal == "rollout":
            return b
        v = torch.from_numpy(s.versions[s.loss_mask]).float()
        alpha = (step - v) / (step + 1 - v)
        if self.config.proximal == "loglinear":
            return b + alpha * (theta - b)
        return ((1 - alpha) * b.exp() + alpha * theta.exp()).log()

    def _policy_loss(self, theta, p, b, A):
        c = self.config
        w = torch.ones(()) if c.loss in COUPLED_LOSSES else self._weight(p, b)
        high = c.clip if c.clip_high is None else c.clip_high

        def clipped(u, A):
            loss = torch.maximum(-A * u, -A * u.clamp(1 - c.clip, 1 + high))
            return loss if c.dual_clip is None else torch.where(A < 0, loss.clamp(max=c.dual_clip * A.abs()), loss)

        def gated(r, A):
            tau = torch.where(A > 0, *c.sapo_tau)
            return -4 / tau / (1 + (-tau * (r - 1)).exp()) * A

        match c.loss:
            case "decoupled_ppo":
                return w * clipped((theta - p).exp(), A)
            case "ppo":
                return clipped((theta - b).exp(), A)
            case "gspo":
                return w * clipped((theta - p).mean().exp().expand(len(theta)), A.mean().expand(len(theta)))
            case "sapo":
                return gated((theta - b).exp(), A)
            case "sapo_sequence":
                return gated((theta - b).mean().exp().expand(len(theta)), A.mean().expand(len(theta)))
            case "cispo":
                return -(theta - b).exp().detach().clamp(max=1 + high) * A * theta
            case "reinforce":
                return -w * A * theta

    def _weight(self, p, b):
        c, d = self.config.behaviour_weight, p - b
        measured = {"ratio": d, "k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[c.metric]
        w = d.exp()
        if c.level == "sequence":
            how = {"sum": torch.sum, "mean": torch.mean, "max": torch.max}[c.aggregate]
            measured = how(measured).expand(len(d))
            w = d.mean().exp().expand(len(d)) if c.metric == "ratio" else w
        measured = measured.exp() if c.metric == "ratio" else measured
        low, high = -np.inf if c.lower is None else c.lower, np.inf if c.upper is None else c.upper
        if c.action == "clamp":
            return w.clamp(low, high)
        return torch.where((measured >= low) & (measured <= high), w, 0.0)
