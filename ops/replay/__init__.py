"""Feeding a recorded log back: into a trainer, into reward workers, into a fresh bus."""
