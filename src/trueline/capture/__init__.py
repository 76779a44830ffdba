"""From a checkpoint to a bundle: emit programs, prove each against the eager model, seal what is proven."""

from trueline._verbs import make_callable
from trueline.capture.proof.attempt import Attempt, Captured

__all__ = ["Attempt", "Captured"]

make_callable(__name__)
