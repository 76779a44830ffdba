"""Bundles as versions of models in MLflow: registered with their digest, resolved by version or alias.

The store is `tracking_uri`, else `MLFLOW_TRACKING_URI`, else MLflow's default (SQLite `mlflow.db` and `mlruns` in the
current folder); no server is needed. Imports no torch, and mlflow only when a function runs; a process that must not
load mlflow calls `python -m trueline.registry`.
"""

from trueline.registry.add import RunFacts, register
from trueline.registry.find import ModelVersion, Resolved, resolve, versions

__all__ = ["ModelVersion", "Resolved", "RunFacts", "register", "resolve", "versions"]
