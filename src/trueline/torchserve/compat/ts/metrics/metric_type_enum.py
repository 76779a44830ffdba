"""TorchServe's module of the kinds of metrics."""

from .metrics_store import MetricTypes

__all__ = ["MetricTypes"]
