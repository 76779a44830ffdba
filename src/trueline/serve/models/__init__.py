"""Models and versions: loading, desired state, retirement, following a registry."""
