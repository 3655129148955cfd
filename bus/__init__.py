"""The log: one table of streams and limits, a port with two adapters, the shell of all workers, the weights' bytes."""
