"""From a bundle to a smaller or faster one that keeps the accuracy of a budget.

bundle ──apply──▶ candidates ──measure──▶ rows ──gate──▶ the best that keeps the budget ──seal──▶ bundle
"""

from trueline._verbs import make_callable

make_callable(__name__)
