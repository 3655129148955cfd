"""Reward workers: user functions in killable processes, and verdicts that are never a silent 0."""

TESTS_MAX = 1000  # of one row of data for the reward `code`; whoever reads data needs it without the reward
