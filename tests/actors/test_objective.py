"""The objective as it is trained, from logits on, against a float64 twin that loops over tokens, in value and gradient.

Each part is right by itself in `test_losses`; here are their signs, factors and masks together, and the entropy bonus.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.trainer.config import CorrectionConfig, KlConfig, TrainerConfig
from actors.trainer.losses import load_loss
from actors.trainer.objective import Objective
from actors.trainer.plan import Micro
from actors.trainer.sections import CORRECTIONS
from tests.actors import naive_losses as naive

TOKENS, WORDS, VERSION = 9, 5, 8
KL = {"reference": "initial"}
OPTIONS = {
    **{f"loss {name}": {"loss": name, "clip": 0.1, "clip_high": 0.15} for name in naive.LOSSES},
    **{f"decoupled under {name}": {"behaviour_weight": name} for name in CORRECTIONS},
    "decoupled under raw weights": {"behaviour_weight": CorrectionConfig(upper=None)},
    "decoupled under a mask by k3": {"behaviour_weight": CorrectionConfig(metric="k3", upper=0.05)},
    "decoupled under clamped sequences": {
        "behaviour_weight": CorrectionConfig(level="sequence", action="clamp", lower=0.9, upper=1.1)
    },
    "gspo under mis": {"loss": "gspo", "behaviour_weight": "mis"},
    "reinforce under tis": {"loss": "reinforce", "behaviour_weight": "tis"},
    "dual clip": {"dual_clip": 1.2},
    "opsm": {"opsm_threshold": 1e-4},
    "loglinear": {"proximal": "loglinear"},
    "linear": {"proximal": "linear"},
    "rollout": {"proximal": "rollout"},
    "kl by k2": KL | {"kl": KlConfig(coef=0.3, estimator="k2")},
    "kl by k3": KL | {"kl": KlConfig(coef=0.3, estimator="k3")},
    "entropy bonus": {"entropy_coef": 0.2},
    "all of it": KL | {"kl": KlConfig(coef=0.3), "entropy_coef": 0.2, "dual_clip": 1.5, "opsm_threshold": 1e-4},
}


def drawn(seed):
    """Logits [n, V] and what belongs to their tokens, of three sequences; some tokens masked, some of advantage 0."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(TOKENS, WORDS))
    targets = rng.integers(0, WORDS, TOKENS)
    theta, _ = naive.of_logits(logits, targets)
    x = {
        "targets": targets,
        "proximal": theta + rng.normal(0, 0.3, TOKENS),
        "behaviour": theta + rng.normal(0, 0.5, TOKENS),
        "reference": theta + rng.normal(0, 0.5, TOKENS),
        "advantages": np.where(rng.random(TOKENS) < 0.1, 0.0, rng.normal(size=TOKENS)),
        "versions": rng.integers(-1, VERSION + 1, TOKENS),
        "sequence": np.arange(TOKENS) // 3,
        "scale": rng.uniform(0.5, 1.5, TOKENS),
        "keep": rng.random(TOKENS) < 0.8,
        "fresh": np.zeros(TOKENS),
    }
    return logits, x


def ours(logits, x, config, dtype):
    """Value and gradient [n, V] of the product's objective, in the precision of `dtype`."""
    moving = torch.from_numpy(logits).to(dtype).requires_grad_()
    distribution = torch.log_softmax(moving, -1)
    given = {name: torch.from_numpy(np.asarray(array)) for name, array in x.items()}
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}
    batch = SimpleNamespace(sequence=given["sequence"], sequences=(0, 1, 2))
    scored = Objective(load_loss(config.loss), config)(
        distribution.gather(1, given["targets"][:, None])[:, 0],
        -(distribution.exp() * distribution).sum(-1),
        Micro(batch, given),
        proximal=given["proximal"],
        keep=given["keep"],
        current_version=VERSION,
        first=True,
    )
    scored.total.backward()
    return scored.total.item(), moving.grad.numpy()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPTIONS)
def test_value_and_gradient_are_those_of_the_twin(name, seed):
    """In float64, and in float32, which is what trains; weights are float32 in either."""
    config = TrainerConfig(**OPTIONS[name])
    logits, x = drawn(seed)

    def twin(flat, held, x):
        return naive.objective(flat.reshape(logits.shape), logits, x, config, VERSION)

    expected = twin(logits.ravel(), logits, x)
    differences = naive.central_differences(twin, logits.ravel(), x).reshape(logits.shape)
    assert np.abs(differences).max() > 0.01, "a gradient of nothing would prove nothing"
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        value, gradient = ours(logits, x, config, dtype)
        assert value == pytest.approx(expected, rel=tolerance, abs=tolerance)
        np.testing.assert_allclose(gradient, differences, rtol=tolerance, atol=tolerance)
