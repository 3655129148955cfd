"""M2PO: bounds the second moment of the log-ratio by masking the few tokens that are furthest off."""

import torch
from torch import Tensor


def second_moment_mask(proximal: Tensor, behaviour: Tensor, threshold: float) -> Tensor:
    """Which tokens to keep, bool [n], of the n trained tokens of a whole optimizer mini-batch.

    Tokens of samples without a gradient are not among them: they would dilute the mean and teach nothing.

    The fewest tokens of largest (behav − prox)² are masked, such that the mean of the rest is below `threshold`; if
    not even the smallest is, all are. Of equal ones those that come first are kept. The caller's denominator still
    counts the masked ones. Terms that are not finite are masked.

    Source: M2PO 2510.01161, threshold 0.04 there.
    """
    squares = (behaviour.detach() - proximal.detach()).double().square()
    squares = torch.where(squares.isfinite(), squares, torch.inf)
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    keep = torch.zeros_like(squares, dtype=torch.bool)
    keep[order] = means < threshold  # means of ascending values ascend: these are the first ones
    return keep
