"""Rollout workers: generate samples, and go on with them across weight updates."""
