"""Reward workers: user functions in killable processes, and verdicts that are never a silent 0."""
