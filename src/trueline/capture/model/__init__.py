"""What capture needs to know of an eager model: its signature, batch axis, state and code paths."""
