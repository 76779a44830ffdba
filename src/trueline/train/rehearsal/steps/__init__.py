"""Batches of the steps that a loop compares its own with."""
