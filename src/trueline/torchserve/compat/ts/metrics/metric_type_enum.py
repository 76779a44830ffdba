"""Kinds of metrics."""

import enum


class MetricTypes(enum.Enum):
    """By the names of TorchServe's metrics.yaml."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
