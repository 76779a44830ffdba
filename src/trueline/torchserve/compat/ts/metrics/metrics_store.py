"""`context.metrics`: a handler's metrics, which the worker sends to the server's /metrics."""

import enum
from collections.abc import Callable, Sequence
from typing import Any


class Dimension:
    """A label: its name and value."""

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"


class MetricTypes(enum.Enum):
    """By the names of TorchServe's metrics.yaml."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Dimensions = Sequence[Dimension] | None


class CachingMetric:
    """A metric from `metrics.add_metric_to_cache`."""

    def __init__(
        self, metric_name: str, unit: str, dimension_names: Sequence[str], metric_type: MetricTypes,
        record: Callable[[str, MetricTypes, float, dict[str, str]], None],
    ) -> None:  # fmt: skip
        self.metric_name, self.unit, self.metric_type = metric_name, unit, metric_type
        self.dimension_names = list(dimension_names)
        self._record = record

    def add_or_update(self, value: float, dimension_values: Sequence[object] = (), request_id: str = "") -> None:
        """Adds to a counter, sets a gauge, observes a histogram. Raises ValueError for a wrong number of labels."""
        if len(dimension_values) != len(self.dimension_names):
            raise ValueError(
                f"metric '{self.metric_name}' has the dimensions {self.dimension_names}, got {list(dimension_values)}"
            )
        labels = {name: str(label) for name, label in zip(self.dimension_names, dimension_values, strict=True)}
        self._record(self.metric_name, self.metric_type, value, labels)

    update = add_or_update


class MetricsStore:
    """Collects the metrics of a batch; the worker drains them with the answer."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.request_ids: Any = None
        self._cache: dict[tuple[MetricTypes, str], CachingMetric] = {}
        self._recorded: list[list[Any]] = []

    def drain(self) -> list[list[Any]]:
        """The metrics since the last call: [name, kind, value, labels]."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def _record(self, name: str, kind: MetricTypes, value: float, labels: dict[str, str]) -> None:
        self._recorded.append([str(name), kind.value, float(value), labels])

    def _add(
        self, name: str | None, kind: MetricTypes, value: float, dimensions: Dimensions, level: str = "Model"
    ) -> None:
        labels = {str(one.name): str(one.value) for one in dimensions or ()}
        self._record(name or "", kind, value, labels | {"ModelName": self.model_name, "Level": level})

    def add_counter(
        self, metric_name: str | None = None, value: float = 1, idx: object = None, dimensions: Dimensions = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        """Adds to a counter."""
        self._add(metric_name or name, MetricTypes.COUNTER, value, dimensions)

    def add_time(
        self, metric_name: str | None = None, value: float = 0, idx: object = None, unit: str = "ms",
        dimensions: Dimensions = None, metric_type: MetricTypes = MetricTypes.GAUGE, name: str | None = None,
    ) -> None:  # fmt: skip
        """Sets a duration."""
        self._add(metric_name or name, metric_type, value, dimensions)

    def add_size(
        self, metric_name: str | None = None, value: float = 0, idx: object = None, unit: str = "MB",
        dimensions: Dimensions = None, metric_type: MetricTypes = MetricTypes.GAUGE, name: str | None = None,
    ) -> None:  # fmt: skip
        """Sets a size."""
        self._add(metric_name or name, metric_type, value, dimensions)

    def add_percent(
        self, metric_name: str | None = None, value: float = 0, idx: object = None, dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.GAUGE, name: str | None = None,
    ) -> None:  # fmt: skip
        """Sets a share."""
        self._add(metric_name or name, metric_type, value, dimensions)

    def add_error(
        self, metric_name: str | None = None, value: float = 1, dimensions: Dimensions = None,
        metric_type: MetricTypes = MetricTypes.COUNTER, name: str | None = None,
    ) -> None:  # fmt: skip
        """Counts an error. A value that is no number counts as one error."""
        counted = value if isinstance(value, int | float) else 1
        self._add(metric_name or name, metric_type, counted, dimensions, "Error")

    def add_metric(
        self, metric_name: str | None = None, value: float = 0, unit: str = "", idx: object = None,
        dimensions: Dimensions = None, metric_type: MetricTypes = MetricTypes.COUNTER, name: str | None = None,
    ) -> None:  # fmt: skip
        """Records any metric."""
        self._add(metric_name or name, metric_type, value, dimensions)

    def add_metric_to_cache(
        self, metric_name: str, unit: str, dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:  # fmt: skip
        """Creates a metric to keep."""
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type, self._record)
        self._cache[metric_type, metric_name] = metric
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """A metric from the cache. Raises KeyError."""
        found = self._cache.get((metric_type, metric_name))
        if found is None:
            names = sorted(name for _, name in self._cache)
            raise KeyError(f"no {metric_type.value} '{metric_name}' was added to the cache (added: {names})")
        return found
