"""TorchServe's module of labels."""

from .metrics_store import Dimension

__all__ = ["Dimension"]
