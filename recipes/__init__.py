"""Recipes that ship with the package: tasks, models and the YAML that a user copies."""
