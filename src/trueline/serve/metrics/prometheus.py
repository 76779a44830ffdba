"""The metrics page: what the counters of the hot path say, in Prometheus' text. Built only when it is asked for."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from time import monotonic
from typing import TYPE_CHECKING

from trueline.serve import host
from trueline.serve.counters import Histogram, ServerStats
from trueline.serve.metrics.gpu import NAMES, Gpus
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Servable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_LABELS = ["model", "version"]
_OF_HOST = re.compile(rb'\{Hostname=("[^"\n]*"),Level="Host"\}')


_TIMES = {
    "QueueTime": "Milliseconds that a request waited",
    "WorkerThreadTime": "Milliseconds that a request spent between the loop and the model's thread",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What a version has done so far; seconds are sums over requests."""

    requests: int = 0
    request_s: float = 0.0
    queue_s: float = 0.0
    infer_s: float = 0.0
    coding_s: float = 0.0

    @classmethod
    def of(cls, version: Servable) -> _Sums:
        stats = version.stats
        return cls(
            requests=stats.request_s.count,
            request_s=stats.request_s.total,
            queue_s=stats.queue_s,
            infer_s=stats.infer_s,
            coding_s=stats.decode_s + stats.encode_s,
        )

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(_Sums)})

    def __sub__(self, other: _Sums) -> _Sums:
        return _Sums(**{field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(_Sums)})


class Collector:
    """Reads the counters as Prometheus metrics: Trueline's own names, and TorchServe's beside them."""

    def __init__(self, models: Models, stats: ServerStats) -> None:
        self._models = models
        self._stats = stats
        self._host = socket.gethostname()
        self._gpus = Gpus()
        self._before: dict[Servable, _Sums] = {}
        self._of_version: dict[Servable, dict[str, float]] = {}
        self._of_all: dict[str, float] = dict.fromkeys(_TIMES, 0.0)
        """Times as they were last told: they stand until something new is known."""
        self.looking = threading.Lock()
        """Of the thread that looks: two at once would each tell a part of what is new."""

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        yield from self._server()
        yield from self._versions()
        yield from self._torchserve()
        yield from self._times()
        yield from self._of_handlers()

    def _of_handlers(self) -> Iterator[Metric]:
        """What handlers count; of several models that count under one name it is one metric."""
        found: dict[str, Metric] = {}
        for version in self._models.all():
            if version.handler is not None:
                for metric in version.handler.collect(self._host):
                    found.setdefault(metric.name, metric)
                    if found[metric.name] is not metric:
                        found[metric.name].samples += metric.samples
        for name, metric in self._programs().items():
            if name in found:
                found[name].samples += metric.samples
            else:
                found[name] = metric
        yield from found.values()

    def _programs(self) -> dict[str, Metric]:
        """What TorchServe's handlers tell of their time, told of programs."""
        from prometheus_client.metrics_core import Metric

        prediction = Metric("PredictionTime", "Milliseconds in the model, under TorchServe's name.", "unknown")
        handler = Metric(
            "HandlerTime", "Milliseconds in reading, model and writing, under TorchServe's name.", "unknown"
        )
        for version, told in self._of_version.items():
            labels = {"ModelName": version.model, "Level": "Model", "Hostname": self._host}
            labels |= {"model_name": version.model, "model_version": version.version}
            for metric in (prediction, handler):
                metric.add_sample(metric.name, labels, told[metric.name])
        return {metric.name: metric for metric in (prediction, handler) if metric.samples}

    def _times(self) -> Iterator[Metric]:
        """TorchServe's times in milliseconds: means of what came since the last look, else what was told then."""
        from prometheus_client.metrics_core import Metric

        every, told_before = _Sums(), self._of_version
        seen = {version: _Sums.of(version) for version in self._models.all()}
        self._of_version = {version: told_before[version] for version in seen if version in told_before}
        for version, sums in seen.items():
            new = sums - self._before.get(version, _Sums())
            every += new
            if new.requests and version.handler is None:  # those tell of it themselves
                self._of_version[version] = {
                    "PredictionTime": 1e3 * new.infer_s / new.requests,
                    "HandlerTime": 1e3 * (new.infer_s + new.coding_s) / new.requests,
                }
        self._before = seen
        if every.requests:
            beside_s = every.request_s - every.queue_s - every.infer_s - every.coding_s
            self._of_all["QueueTime"] = 1e3 * every.queue_s / every.requests
            self._of_all["WorkerThreadTime"] = 1e3 * max(0.0, beside_s) / every.requests
        for name, told in _TIMES.items():
            yield self._of_host(name, f"{told}, under TorchServe's name.", self._of_all[name])
        loading = Metric("WorkerLoadTime", "Milliseconds until it was ready, under TorchServe's name.", "unknown")
        for version in self._models.all():
            for worker, load_s in version.load_times.items():
                labels = {"WorkerName": worker, "Level": "Host", "Hostname": self._host}
                loading.add_sample(loading.name, labels, 1e3 * load_s)
        yield loading
        for name, devices in self._gpus.look(monotonic()).items():
            metric = Metric(name, f"{NAMES[name]}, under TorchServe's name.", "unknown")
            for device, value in devices.items():
                metric.add_sample(name, {"Level": "Host", "DeviceId": device, "Hostname": self._host}, value)
            yield metric

    def _server(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        answers = CounterMetricFamily("trueline_answers", "Answers by HTTP status.", labels=["status"])
        by_status = dict(self._stats.by_status)
        for status, count in sorted(by_status.items()):
            answers.add_metric([str(status)], count)
        yield answers
        yield GaugeMetricFamily("trueline_ready", "1 when every version is ready.", value=float(self._models.ready))
        for head in (2, 4, 5):
            count = sum(n for status, n in by_status.items() if status // 100 == head)
            yield self._of_host(f"Requests{head}XX", f"Answers of status {head}xx, under TorchServe's name.", count)
        for name, (told, value) in host.readings().items():
            yield self._of_host(name, f"{told}, under TorchServe's name.", value)

    def _of_host(self, name: str, told: str, value: float) -> Metric:
        from prometheus_client.metrics_core import Metric

        family = Metric(name, told, "unknown")
        family.add_sample(name, {"Level": "Host", "Hostname": self._host}, value)
        return family

    def _versions(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        request = HistogramMetricFamily(
            "trueline_request_seconds", "From a whole request to its answer.", labels=_LABELS
        )
        run = HistogramMetricFamily("trueline_run_seconds", "One run of the program.", labels=_LABELS)
        rows = HistogramMetricFamily("trueline_run_rows", "Rows of one run.", labels=_LABELS)
        waiting = GaugeMetricFamily("trueline_waiting_requests", "Requests in the queue.", labels=_LABELS)
        failed = CounterMetricFamily("trueline_failed_requests", "Requests on which the model failed.", labels=_LABELS)
        for version in self._models.all():
            labels = [version.model, version.version]
            for family, histogram in (
                (request, version.stats.request_s),
                (run, version.stats.batch_s),
                (rows, version.stats.batch_rows),
            ):
                family.add_metric(labels, _buckets(histogram), histogram.total)
            waiting.add_metric(labels, version.num_waiting)
            failed.add_metric(labels, version.stats.failed)
        yield from (request, run, rows, waiting, failed)

    def _torchserve(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import Metric

        requests = Metric("ts_inference_requests_total", "Inference requests, under TorchServe's name.", "unknown")
        latency = Metric("ts_inference_latency_microseconds", "Their time, under TorchServe's name.", "unknown")
        queued = Metric("ts_queue_latency_microseconds", "How long they waited, under TorchServe's name.", "unknown")
        for version in self._models.all():
            labels = {"model_name": version.model, "model_version": version.version, "hostname": self._host}
            requests.add_sample(requests.name, labels, version.stats.request_s.count)
            latency.add_sample(latency.name, labels, version.stats.request_s.total * 1e6)
            queued.add_sample(queued.name, labels, version.stats.queue_s * 1e6)
        yield from (requests, latency, queued)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    cells, running, found = list(histogram.cells), 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), cells, strict=True):
        running += count
        found.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
    return found


def page(collector: Collector, names: Collection[str] = ()) -> bytes:
    """The whole page, or of it the metrics of these names.

    Labels of the host are written as TorchServe writes them, with a comma behind the last, which its clients look for.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    with collector.looking:
        every = generate_latest(registry)
    told = _only(every, names) if names else every
    return _OF_HOST.sub(rb'{Level="Host",Hostname=\1,}', told)


def _only(told: bytes, names: Collection[str]) -> bytes:
    wanted = {name.encode() for name in names}
    kept, keep = [], False
    for line in told.splitlines(keepends=True):
        if line.startswith(b"# HELP "):  # every metric begins with one
            name = line.split(b" ", 3)[2]
            keep = name in wanted or name.removesuffix(b"_total") in wanted
        if keep:
            kept.append(line)
    return b"".join(kept)
