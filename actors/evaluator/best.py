"""Which of several evaluated versions is the best."""

from __future__ import annotations

from collections.abc import Iterable

from schemas import Evaluation


def best_of(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """The evaluation with the highest mean reward, of equal ones that of the earliest version; None if none has one.

    Compare only evaluations on the same set of problems (`Evaluation.data`).
    """
    scored = [evaluation for evaluation in evaluations if evaluation.reward is not None]
    return max(scored, key=lambda one: (one.reward or 0.0, -one.version), default=None)
