"""The loop of a user before its first step: tried in a fork, which nothing is trained with."""
