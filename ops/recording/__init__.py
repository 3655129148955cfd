"""Recordings: a run's whole log, its recipe and its initial model in one portable file."""
