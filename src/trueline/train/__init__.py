"""Elastic training: many processes, one sequence of optimizer steps. `trueline.train(recipe)` runs a whole job."""

from trueline._verbs import make_callable

make_callable(__name__)
