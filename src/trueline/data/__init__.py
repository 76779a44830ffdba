"""Records: where they come from (Source) and in which order they are trained (order)."""
