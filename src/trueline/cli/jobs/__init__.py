"""Commands for running training jobs."""
