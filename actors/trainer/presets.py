"""Algorithms by the field's names: what `trainer.algorithm` fills in. Imports no torch.

A name fills in only keys that a recipe leaves out. On the command line the last word counts: an override
`trainer.algorithm=…` replaces the finer keys of the recipe file, and overrides of finer keys then refine it.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

Algorithm = Literal[
    "grpo", "dr_grpo", "rloo", "lite_ppo", "dapo", "gspo", "sapo", "cispo", "reinforce_pp", "m2po", "ppo"
]

_GROUP = {"mean": "group", "std": "group"}
_TOKENS = {"mean": "none", "std": "none", "token_mean": "batch", "token_std": "batch"}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "decoupled_ppo", "advantage": _GROUP},
    "dr_grpo": {"loss": "decoupled_ppo", "advantage": {"mean": "group", "std": "none"}, "aggregation": "constant"},
    "rloo": {"loss": "reinforce", "advantage": {"mean": "group", "std": "none", "leave_one_out": True}},
    "lite_ppo": {"loss": "decoupled_ppo", "advantage": {"mean": "group", "std": "batch"}},
    "dapo": {"loss": "decoupled_ppo", "clip": 0.2, "clip_high": 0.28, "advantage": _GROUP, "overlong": {}},
    "gspo": {"loss": "gspo", "clip": 3e-4, "clip_high": 4e-4, "advantage": _GROUP, "aggregation": "sequence_mean"},
    "sapo": {"loss": "sapo", "sapo_tau": (1.0, 1.05), "advantage": _GROUP, "aggregation": "sequence_mean"},
    "cispo": {"loss": "cispo", "clip_high": 4.0, "advantage": _GROUP},
    "reinforce_pp": {"loss": "decoupled_ppo", "advantage": _TOKENS},
    "m2po": {"loss": "decoupled_ppo", "advantage": _GROUP, "m2po_threshold": 0.04},
    "ppo": {"loss": "decoupled_ppo", "advantage": _TOKENS, "critic": {}},
}
assert tuple(PRESETS) == get_args(Algorithm)

# What else of the recipe belongs to an algorithm.
CONTROLLER: dict[str, dict[str, Any]] = {"dapo": {"filter": "zero_variance"}}

GOVERNED = frozenset(key for preset in PRESETS.values() for key in preset)  # the trainer's keys that presets speak of


def chosen_anew(fields: Mapping[str, Any], algorithm: object) -> dict[str, Any]:
    """A recipe's fields without those that its algorithm, or its finer keys, filled in: another one is to do it."""
    trainer, controller = fields.get("trainer"), fields.get("controller")
    out = dict(fields)
    if isinstance(trainer, dict):
        out["trainer"] = {key: value for key, value in trainer.items() if key not in GOVERNED}
    if isinstance(controller, dict):
        before = trainer.get("algorithm") if isinstance(trainer, dict) else None
        asked = {key for name in (before, algorithm) for key in CONTROLLER.get(str(name), {})}
        out["controller"] = {key: value for key, value in controller.items() if key not in asked}
    return out


def with_preset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's fields, with those that its algorithm fills in; what is given counts, section by section."""
    return _merged(PRESETS.get(str(fields.get("algorithm")), {}), fields)


def _merged(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(preset[key], value) if isinstance(value, dict) and isinstance(preset.get(key), dict) else value
        for key, value in given.items()
    }
    return {**preset, **both}
