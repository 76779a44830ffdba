"""`context.metrics`: what a handler counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .caching_metric import CachingMetric
from .dimension import Dimension
from .metric_type_enum import MetricTypes

Dimensions = Sequence[Dimension] | None


class MetricsStore:
    """Gathers what is counted in a batch; the worker drains it with the answer."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.request_ids: Any = None
        self._cache: dict[tuple[MetricTypes, str], CachingMetric] = {}
        self._told: list[list[Any]] = []

    def drain(self) -> list[list[Any]]:
        """What was counted since the last call: [name, kind, value, labels]."""
        told, self._told = self._told, []
        return told

    def _tell(self, name: str, kind: MetricTypes, value: float, labels: dict[str, str]) -> None:
        self._told.append([str(name), kind.value, float(value), labels])

    def _add(self, name: str, kind: MetricTypes, value: float, dimensions: Dimensions, level: str = "Model") -> None:
        labels = {str(one.name): str(one.value) for one in dimensions or ()}
        self._tell(name, kind, value, labels | {"ModelName": self.model_name, "Level": level})

    def add_counter(
        self,
        metric_name: str | None = None,
        value: float = 1,
        idx: object = None,
        dimensions: Dimensions = None,
        name: str | None = None,
    ) -> None:
        """Adds to a counter."""
        self._add(metric_name or name or "", MetricTypes.COUNTER, value, dimensions)

    def add_time(
        self,
        metric_name: str | None = None,
        value: float = 0,
        idx: object = None,
        unit: str = "ms",
        dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
        name: str | None = None,
    ) -> None:
        """Sets how long something took."""
        self._add(metric_name or name or "", metric_type, value, dimensions)

    def add_size(
        self,
        metric_name: str | None = None,
        value: float = 0,
        idx: object = None,
        unit: str = "MB",
        dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
        name: str | None = None,
    ) -> None:
        """Sets how large something is."""
        self._add(metric_name or name or "", metric_type, value, dimensions)

    def add_percent(
        self,
        metric_name: str | None = None,
        value: float = 0,
        idx: object = None,
        dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
        name: str | None = None,
    ) -> None:
        """Sets a share."""
        self._add(metric_name or name or "", metric_type, value, dimensions)

    def add_error(
        self,
        metric_name: str | None = None,
        value: float = 1,
        dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        name: str | None = None,
    ) -> None:
        """Counts an error. What is no number counts as one."""
        counted = value if isinstance(value, int | float) else 1
        self._add(metric_name or name or "", metric_type, counted, dimensions, "Error")

    def add_metric(
        self,
        metric_name: str | None = None,
        value: float = 0,
        unit: str = "",
        idx: object = None,
        dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        name: str | None = None,
    ) -> None:
        """Any metric."""
        self._add(metric_name or name or "", metric_type, value, dimensions)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """A metric to keep."""
        made = CachingMetric(metric_name, unit, dimension_names, metric_type, self._tell)
        self._cache[metric_type, metric_name] = made
        return made

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """A metric that was kept. Raises KeyError."""
        found = self._cache.get((metric_type, metric_name))
        if found is None:
            names = sorted(name for _, name in self._cache)
            raise KeyError(f"no {metric_type.value} '{metric_name}' was added to the cache (added: {names})")
        return found
