"""What runs around a learner's script: its guard, the hook in its Python processes, its way to the master."""
