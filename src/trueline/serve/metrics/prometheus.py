"""The metrics page: the counters of the hot path in Prometheus' text format, built at each scrape.

Trueline's own names come first, then the same under TorchServe's names, which its dashboards read.
"""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from trueline import events
from trueline.serve import host
from trueline.serve.counters import Histogram, ServerStats
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Servable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_LABELS = ["model", "version"]
_HOST_LABELS = re.compile(rb'\{Hostname=("[^"\n]*"),Level="Host"\}')
_COUNTER = re.compile(rb"^# HELP (?P<name>\S+)_total (.*\n)# TYPE (?P=name)_total (counter\n)(\w+)", re.M)
_TIMES = {
    "QueueTime": "Milliseconds that a request waited",
    "WorkerThreadTime": "Milliseconds that a request spent between the loop and the model's thread",
}

_GPU_NAMES = {
    "GPUUtilization": "Busy NVIDIA device, percent",
    "GPUMemoryUsed": "Used memory of an NVIDIA device, megabytes",
    "GPUMemoryUtilization": "Used memory of an NVIDIA device, percent",
}
_GPU_EVERY_S = 60.0
_GPU_QUERY = "index,utilization.gpu,memory.used,memory.total"
_GPU_TIMEOUT_S = 20.0

Readings = dict[str, dict[str, float]]
"""By TorchServe's names, and then by device."""


_Sums = dict[str, float]
"""What a version has done so far; seconds are sums over requests."""


def _sums_of(version: Servable) -> _Sums:
    stats = version.stats
    return {
        "requests": stats.request_s.count,
        "request_s": stats.request_s.total,
        "queue_s": stats.queue_s,
        "infer_s": stats.infer_s,
        "coding_s": stats.decode_s + stats.encode_s,
    }


class Collector:
    """Reads the counters as Prometheus metrics."""

    def __init__(self, models: Models, stats: ServerStats) -> None:
        self._models = models
        self._stats = stats
        self._host = socket.gethostname()
        self._gpus = Gpus()
        self._before: dict[Servable, _Sums] = {}
        self._of_version: dict[Servable, dict[str, float]] = {}
        self._of_all: dict[str, float] = dict.fromkeys(_TIMES, 0.0)
        """Times of the last scrape, which stay until there are new requests."""
        self.lock = threading.Lock()
        """Held by the thread that collects: of two at once, each would see a part of the new requests."""

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        from prometheus_client import ProcessCollector

        yield from self._collect_server()
        yield from self._collect_versions()
        yield from self._collect_torchserve()
        yield from self._collect_times()
        yield from self._collect_handlers()
        yield from ProcessCollector(registry=None).collect()

    def _collect_server(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        answers = CounterMetricFamily("trueline_answers", "Answers by HTTP status.", labels=["status"])
        by_status = dict(self._stats.by_status)
        for status, count in sorted(by_status.items()):
            answers.add_metric([str(status)], count)
        yield answers
        yield GaugeMetricFamily("trueline_ready", "1 when every version is ready.", value=float(self._models.ready))
        for head in (2, 4, 5):
            count = sum(n for status, n in by_status.items() if status // 100 == head)
            yield self._host_metric(f"Requests{head}XX", f"Answers of status {head}xx", count, "counter")
        for name, (text, value) in host.readings().items():
            yield self._host_metric(name, text, value)

    def _host_metric(self, name: str, text: str, value: float, kind: str = "gauge") -> Metric:
        metric = _torchserve_metric(name, text, kind)
        metric.add_sample(name, {"Level": "Host", "Hostname": self._host}, value)
        return metric

    def _collect_versions(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        request = HistogramMetricFamily(
            "trueline_request_seconds", "From a whole request to its answer.", labels=_LABELS
        )
        run = HistogramMetricFamily("trueline_run_seconds", "One run of the program.", labels=_LABELS)
        rows = HistogramMetricFamily("trueline_run_rows", "Rows of one run.", labels=_LABELS)
        waiting = GaugeMetricFamily("trueline_waiting_requests", "Requests in the queue.", labels=_LABELS)
        failed = CounterMetricFamily("trueline_failed_requests", "Requests on which the model failed.", labels=_LABELS)
        able = GaugeMetricFamily("trueline_version_ready", "1 when a request would be answered now.", labels=_LABELS)
        for version in self._models.all():
            labels, stats = [version.model, version.version], version.stats
            for family, histogram in ((request, stats.request_s), (run, stats.batch_s), (rows, stats.batch_rows)):
                family.add_metric(labels, _buckets(histogram), histogram.total)
            waiting.add_metric(labels, version.num_waiting)
            failed.add_metric(labels, stats.failed)
            able.add_metric(labels, float(not version.obstacle))
        yield from (request, run, rows, waiting, failed, able)

    def _collect_torchserve(self) -> Iterator[Metric]:
        requests = _torchserve_metric("ts_inference_requests_total", "Inference requests", "counter")
        latency = _torchserve_metric("ts_inference_latency_microseconds", "Their time", "counter")
        queued = _torchserve_metric("ts_queue_latency_microseconds", "How long they waited", "counter")
        for version in self._models.all():
            labels = {"model_name": version.model, "model_version": version.version, "hostname": self._host}
            requests.add_sample(requests.name, labels, version.stats.request_s.count)
            latency.add_sample(latency.name, labels, version.stats.request_s.total * 1e6)
            queued.add_sample(queued.name, labels, version.stats.queue_s * 1e6)
        yield from (requests, latency, queued)

    def _collect_times(self) -> Iterator[Metric]:
        """TorchServe's times in milliseconds: means over the requests since the last scrape, if there were any."""
        new: defaultdict[str, float] = defaultdict(float)
        before, self._before = self._before, {version: _sums_of(version) for version in self._models.all()}
        self._of_version = {version: times for version, times in self._of_version.items() if version in self._before}
        for version, sums in self._before.items():
            own = {name: value - before.get(version, {}).get(name, 0) for name, value in sums.items()}
            for name, value in own.items():
                new[name] += value
            if own["requests"] and version.handler is None:  # handlers count their own times
                self._of_version[version] = {
                    "PredictionTime": 1e3 * own["infer_s"] / own["requests"],
                    "HandlerTime": 1e3 * (own["infer_s"] + own["coding_s"]) / own["requests"],
                }
        if new["requests"]:
            beside_s = new["request_s"] - new["queue_s"] - new["infer_s"] - new["coding_s"]
            self._of_all["QueueTime"] = 1e3 * new["queue_s"] / new["requests"]
            self._of_all["WorkerThreadTime"] = 1e3 * max(0.0, beside_s) / new["requests"]
        for name, text in _TIMES.items():
            yield self._host_metric(name, text, self._of_all[name])
        loading = _torchserve_metric("WorkerLoadTime", "Milliseconds until it was ready")
        for version in self._models.all():
            for worker, load_s in version.load_times.items():
                labels = {"WorkerName": worker, "Level": "Host", "Hostname": self._host}
                loading.add_sample(loading.name, labels, 1e3 * load_s)
        yield loading
        for name, devices in self._gpus.read(monotonic()).items():
            metric = _torchserve_metric(name, _GPU_NAMES[name])
            for device, value in devices.items():
                metric.add_sample(name, {"Level": "Host", "DeviceId": device, "Hostname": self._host}, value)
            yield metric

    def _collect_handlers(self) -> Iterator[Metric]:
        """What handlers count, and the same of programs; one metric for each name, whichever models count it."""
        by_name: dict[str, Metric] = {}
        counted = [version.handler.collect(self._host) for version in self._models.all() if version.handler is not None]
        for metric in [*(one for metrics in counted for one in metrics), *self._program_times()]:
            if by_name.setdefault(metric.name, metric) is not metric:
                by_name[metric.name].samples += metric.samples
        yield from by_name.values()

    def _program_times(self) -> list[Metric]:
        """The times of programs under the names that TorchServe's handlers use."""
        prediction = _torchserve_metric("PredictionTime", "Milliseconds in the model")
        handler = _torchserve_metric("HandlerTime", "Milliseconds in reading, model and writing")
        for version, times in self._of_version.items():
            labels = {"ModelName": version.model, "Level": "Model", "Hostname": self._host}
            labels |= {"model_name": version.model, "model_version": version.version}
            for metric in (prediction, handler):
                metric.add_sample(metric.name, labels, times[metric.name])
        return [metric for metric in (prediction, handler) if metric.samples]


def _torchserve_metric(name: str, text: str, kind: str = "gauge") -> Metric:
    """Of the type that it has in TorchServe's metrics.yaml."""
    from prometheus_client.metrics_core import Metric

    return Metric(name, f"{text}, under TorchServe's name.", kind)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    cells, running, buckets = list(histogram.cells), 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), cells, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
    return buckets


def page(collector: Collector, names: Collection[str] = ()) -> bytes:
    """The page, or only the metrics with `names`.

    Labels of the host are written as TorchServe writes them, with a comma after the last, which its clients parse.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    with collector.lock:
        text = _COUNTER.sub(_name_counter, generate_latest(registry))
    return _HOST_LABELS.sub(rb'{Level="Host",Hostname=\1,}', _select(text, names) if names else text)


def _name_counter(match: re.Match[bytes]) -> bytes:
    """The head of a counter named as its samples: prometheus_client adds `_total`, TorchServe does not."""
    name, help_line, type_line, sample = match.groups()
    if sample.startswith(name + b"_total"):
        return match[0]
    return b"# HELP %b %b# TYPE %b %b%b" % (name, help_line, name, type_line, sample)


def _select(text: bytes, names: Collection[str]) -> bytes:
    selected = {name.encode() for name in names}
    lines, keep = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith(b"# HELP "):  # every metric begins with one
            name = line.split(b" ", 3)[2]
            keep = name in selected or name.removesuffix(b"_total") in selected
        if keep:
            lines.append(line)
    return b"".join(lines)


class Gpus:
    """Readings of NVIDIA devices, made in a thread at most once a minute: a scrape never waits for the driver.

    Source: `nvidia-smi --help-query-gpu`.
    """

    def __init__(self) -> None:
        self.last: Readings = {}
        self._read_at: float | None = None
        self._thread: threading.Thread | None = None

    def read(self, now: float) -> Readings:
        """The last readings at `now` (monotonic seconds); when they are old, a thread fetches new ones for later."""
        last = self.last  # the thread may end before this returns
        if host.gpus() and (self._read_at is None or now - self._read_at >= _GPU_EVERY_S):
            self._read_at = now
            self._thread = threading.Thread(target=self._fetch, name="gpus", daemon=True)
            self._thread.start()
        return last

    def wait(self) -> None:
        """Returns when no thread is reading."""
        if self._thread is not None:
            self._thread.join()

    def _fetch(self) -> None:
        began = monotonic()
        command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
            self.last = parse_gpus(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.last = {}
            events.emit("gpus.unread", why=str(error), took_s=monotonic() - began)


def parse_gpus(text: str) -> Readings:
    """Lines of `nvidia-smi`: index, busy percent, MiB used, MiB in total. Values that a device lacks are left out.

    Raises ValueError for other text.

    >>> parse_gpus("0, 30, 1024, 4096")
    {'GPUUtilization': {'0': 30.0}, 'GPUMemoryUsed': {'0': 1024.0}, 'GPUMemoryUtilization': {'0': 25.0}}
    """
    readings: Readings = {name: {} for name in _GPU_NAMES}
    for line in filter(None, map(str.strip, text.splitlines())):
        device, busy, used, total = (one.strip() for one in line.split(","))
        if not busy.startswith("["):  # "[N/A]"
            readings["GPUUtilization"][device] = float(busy)
        if not used.startswith("["):
            readings["GPUMemoryUsed"][device] = float(used)
            readings["GPUMemoryUtilization"][device] = 100 * float(used) / max(1.0, float(total))
    return readings
