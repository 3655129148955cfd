"""Messages on the wire. Imports nothing of ours, no torch, no nats."""
