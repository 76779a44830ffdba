"""Which parts of a model cannot be captured, at which line, why, and the smallest rewrite that was proven."""

from trueline._verbs import make_callable
from trueline.doctor.report import Cause, Diagnosis, Rewrite, Row

__all__ = ["Cause", "Diagnosis", "Rewrite", "Row"]

make_callable(__name__)
