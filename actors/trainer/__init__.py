"""The trainer actor."""
