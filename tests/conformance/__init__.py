"""One suite for each seam, shared by all its implementations: `from conformance.engine import *` and its fixture."""
