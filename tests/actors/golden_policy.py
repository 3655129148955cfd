"""The reference's inputs as flat trained tokens, and its gradients back in rows."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "areal.json").read_text())


class Inputs(NamedTuple):
    theta: Tensor
    prox: Tensor
    behav: Tensor
    adv: Tensor
    sequence: Tensor
    mask: Tensor  # bool [12]: where the flat tokens stand in the reference's 2 x 6


def inputs(theta_row1_plus: float = 0.0) -> Inputs:
    mask = torch.tensor(GOLDEN["inputs"]["mask"]).bool()
    theta = torch.tensor(GOLDEN["inputs"]["theta"])
    theta[1] += theta_row1_plus
    prox, behav, adv = (torch.tensor(GOLDEN["inputs"][name])[mask] for name in ("prox", "behav", "adv"))
    sequence = torch.arange(2)[:, None].expand(2, 6)[mask]
    return Inputs(theta[mask].requires_grad_(), prox, behav, adv, sequence, mask.flatten())


def in_rows(flat: Tensor, mask: Tensor) -> list[float]:
    rows = torch.zeros(12)
    rows[mask] = flat.detach().float()
    return rows.tolist()
