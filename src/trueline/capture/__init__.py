"""From a checkpoint to a bundle: emit programs, prove each against the eager model, seal what is proven."""

from trueline.capture.api import capture
from trueline.capture.attempt import Attempt, Captured

__all__ = ["Attempt", "Captured", "capture"]
