"""The evaluator: a subscriber that is pinned to versions, asks them held-out problems, and stops nobody."""
