"""A metric that a handler keeps and adds to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .metric_type_enum import MetricTypes


class CachingMetric:
    """Made by `metrics.add_metric_to_cache`; its values go to the server with the batch's answer."""

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str],
        metric_type: MetricTypes,
        tell: Callable[[str, MetricTypes, float, dict[str, str]], None],
    ) -> None:
        self.metric_name = metric_name
        self.unit = unit
        self.dimension_names = list(dimension_names)
        self.metric_type = metric_type
        self._tell = tell

    def add_or_update(self, value: float, dimension_values: Sequence[object] = (), request_id: str = "") -> None:
        """Adds to a counter, sets a gauge, observes a histogram. Raises ValueError for other labels than it has."""
        if len(dimension_values) != len(self.dimension_names):
            raise ValueError(
                f"metric '{self.metric_name}' has the dimensions {self.dimension_names}, got {list(dimension_values)}"
            )
        labels = {name: str(told) for name, told in zip(self.dimension_names, dimension_values, strict=True)}
        self._tell(self.metric_name, self.metric_type, value, labels)

    update = add_or_update
