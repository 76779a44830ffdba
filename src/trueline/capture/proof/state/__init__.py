"""What a model keeps or reads beside its inputs, and whether that changes its answers."""
