"""Proof that a program answers as the eager model: probes, comparison, determinism, blame."""
