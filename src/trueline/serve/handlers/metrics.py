"""Metrics that handlers count, summed over their processes until a scrape.

A process sends name, kind, value and labels with each answer. Counters add up, gauges keep the last value, histograms
are kept in cells. A model has at most MAX_SERIES series.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from trueline import events
from trueline.serve.counters import BOUNDS_S, Histogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Kind = Literal["counter", "gauge", "histogram"]
MAX_SERIES = 1000
_BAD = re.compile(r"[^a-zA-Z0-9_]")
_BOUNDS_MS = tuple(bound * 1e3 for bound in BOUNDS_S)

Labels = tuple[tuple[str, str], ...]


def name_of(text: str) -> str:
    """`text` as a valid Prometheus name.

    >>> name_of("inference-ms"), name_of("2nd")
    ('inference_ms', '_2nd')
    """
    made = _BAD.sub("_", text[:128])
    return made if made and not made[0].isdigit() else f"_{made}"


@dataclass(slots=True)
class _Family:
    kind: Kind
    series: dict[Labels, float | Histogram] = field(default_factory=dict)


class Measures:
    def __init__(self, model: str, version: str) -> None:
        self._model, self._version = model, version
        self._families: dict[str, _Family] = {}
        self._num_series = 0
        self._left_out = False

    def add(self, records: Any) -> None:
        """Adds records [name, kind, value, {label: value}] of an answer; skips others."""
        for record in records if isinstance(records, list) else []:
            match record:
                case [str(name), str(kind), int(value) | float(value), dict(labels)]:
                    if kind in get_args(Kind) and math.isfinite(value) and not isinstance(value, bool):
                        self._add(name_of(name), cast("Kind", kind), float(value), labels)

    def _add(self, name: str, kind: Kind, value: float, labels: dict[str, Any]) -> None:
        family = self._families.setdefault(name, _Family(kind))
        if family.kind != kind:
            return
        key: Labels = tuple(sorted((name_of(one), str(text)[:128]) for one, text in list(labels.items())[:16]))
        known = family.series.get(key)
        if known is None:
            if self._num_series >= MAX_SERIES:
                if not self._left_out:
                    self._left_out = True
                    events.emit("metric.left_out", model=self._model, name=name, why=f"more than {MAX_SERIES} series")
                return
            self._num_series += 1
            family.series[key] = known = Histogram(_BOUNDS_MS) if kind == "histogram" else 0.0
        if isinstance(known, Histogram):
            known.add(value)
        elif kind == "counter":
            family.series[key] = known + max(0.0, value)
        else:
            family.series[key] = value

    def collect(self, host: str) -> Iterator[Metric]:
        """For prometheus_client. As in TorchServe the names are the handler's and `host` is a label."""
        from prometheus_client.metrics_core import Metric

        own = {"model_name": self._model, "model_version": self._version, "Hostname": host}
        for name, family in list(self._families.items()):
            found = Metric(name, f"Counted by the handler of {self._model}.", family.kind)
            for key, value in list(family.series.items()):
                labels = dict(key) | own
                if not isinstance(value, Histogram):
                    found.add_sample(name, labels, value)
                    continue
                running = 0
                for bound, count in zip((*value.bounds, math.inf), value.cells, strict=True):
                    running += count
                    le = "+Inf" if bound == math.inf else repr(bound)
                    found.add_sample(f"{name}_bucket", labels | {"le": le}, running)
                found.add_sample(f"{name}_count", labels, running)
                found.add_sample(f"{name}_sum", labels, value.total)
            yield found
