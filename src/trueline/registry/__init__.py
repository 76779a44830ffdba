"""Bundles as versions of models in MLflow: registered with their digest, found again by version or alias.

Every function talks to one store, named by `tracking_uri`, by `MLFLOW_TRACKING_URI`, or MLflow's own default
(SQLite `mlflow.db` and `mlruns` in the current folder), and works without a server. Imports no torch, and
mlflow only when a function runs; a process that must not hold mlflow calls `python -m trueline.registry` (see
`__main__`).
"""

from trueline.registry.add import RunFacts, register
from trueline.registry.find import ModelVersion, Resolved, resolve, versions

__all__ = ["ModelVersion", "Resolved", "RunFacts", "register", "resolve", "versions"]
