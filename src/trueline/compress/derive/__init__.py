"""Recipes that compress derives from the user's: the same data and loss, and a model that is pruned or taught."""
