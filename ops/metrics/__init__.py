"""The metrics of a run in files that other programs read: JSON lines and TensorBoard's event files.

A sink is a subscriber like any other. What it has written it reads from its own files, so it may be killed and begun
again, and it may begin when the run has ended: it writes each step once.
"""
