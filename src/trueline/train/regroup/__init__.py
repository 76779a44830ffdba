"""Forming the next generation in process, and transferring state to members that lack it."""
