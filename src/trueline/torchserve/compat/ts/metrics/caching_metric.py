"""TorchServe's module of metrics that a handler keeps."""

from .metrics_store import CachingMetric

__all__ = ["CachingMetric"]
