"""The server's pages: a start page, live charts of models and traffic, and a form to send requests.

    GET /                   for a browser: what is served, and links to the other pages
    GET /dashboard          the charts: one file without data that fetches nothing from other hosts
    GET /dashboard/state    its data as JSON, read once a second
    GET /dashboard/history  counters of the last five minutes, read once, so that a page opened late has charts
    GET /try                a form for each path of the server's OpenAPI document

Counters only grow; the page computes differences. Where tokens are required, the page asks its user for one.
"""

from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from trueline.serve.counters import BOUNDS_S, ServerStats
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Servable
from trueline.web.messages import JSON, Response
from trueline.web.pages import HTML, page_headers, read_page

SAMPLE_S = 1.0
HISTORY_SAMPLES, HISTORY_MODELS = 300, 50


@cache
def _read(name: str) -> tuple[bytes, bytes]:
    """A page and its headers."""
    html = read_page(Path(__file__).with_name(name))
    return html, page_headers(html)


def _page(name: str) -> Response:
    html, headers = _read(name)
    return Response(200, html, HTML, headers)


def home_page() -> Response:
    return _page("home.html")


def page() -> Response:
    return _page("dashboard.html")


def try_page() -> Response:
    """GET /try: a form for each path in the server's OpenAPI document."""
    return _page("try.html")


class History:
    """Samples of each version's counters, one a second, for the last five minutes of this process."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, list[dict[str, Any]]]]] = deque(maxlen=HISTORY_SAMPLES)

    def record(self, models: Models, now: float) -> None:
        """Adds a sample of `now` (Unix time): models in the order of their names, 50 at most."""
        sample = {
            name: [_count(models.find(name, version)) for version in models.versions(name)]
            for name in models.names()[:HISTORY_MODELS]
        }
        self._samples.append((now, sample))

    def answer(self) -> Response:
        body = [
            {"now": at, "models": [{"name": name, "versions": versions} for name, versions in sample.items()]}
            for at, sample in self._samples
        ]
        return Response(200, msgspec.json.encode(body), JSON, b"cache-control: no-store\r\n")


def answer(models: Models, stats: ServerStats, now: float) -> Response:
    return Response(200, msgspec.json.encode(state(models, stats, now)), JSON, b"cache-control: no-store\r\n")


def state(models: Models, stats: ServerStats, now: float) -> dict[str, Any]:
    """What is served at `now` (Unix time). Counts and seconds are sums since the start."""
    return {
        "now": now,
        "ready": models.ready,
        "bounds_s": BOUNDS_S,
        "answers": {str(status): count for status, count in sorted(stats.by_status.items())},
        "models": [_model(models, name) for name in models.names()],
    }


def _model(models: Models, name: str) -> dict[str, Any]:
    split, shadow, default = models.split(name), models.shadows.get(name), models.default(name)
    weights = dict(split.weights) if split is not None else {default: 1.0}
    total = sum(weights.values())
    return {
        "name": name,
        "default": default,
        "versions": [
            _version(models.find(name, version), weights.get(version, 0.0) / total) for version in models.versions(name)
        ],
        "shadow": None if shadow is None else shadow.facts(),
    }


def _count(version: Servable) -> dict[str, Any]:
    stats = version.stats
    return {
        "version": version.version,
        "waiting": version.num_waiting,
        "requests": stats.request_s.count,
        "latency_cells": list(stats.request_s.cells),
        "queue_s": stats.queue_s,
        "infer_s": stats.infer_s,
        "rows": stats.rows,
        "runs": stats.batch_s.count,
    }


def _version(version: Servable, share: float) -> dict[str, Any]:
    stats = version.stats
    facts: dict[str, Any] = {
        **_count(version),
        "state": version.state,
        "reason": version.reason,
        "share": share,
        "since": version.since,
        "failed": stats.failed,
        "request_s": stats.request_s.total,
    }
    if version.state == "ready" and version.handler is not None:
        facts |= {"digest": version.digest, "platform": "torchserve_archive", "workers": version.policy.lanes}
    elif version.state == "ready":
        loaded = version.program.loaded
        facts |= {
            "digest": loaded.digest,
            "platform": loaded.platform,
            "golden_cases": loaded.golden_cases,
            "batching": loaded.plan.batch,
            "batching_reason": loaded.plan.why,
            "max_batch": loaded.plan.max_batch,
            "workers": version.policy.lanes,
            "run_us": {str(rows): seconds * 1e6 for rows, seconds in loaded.plan.latency_s.items()},
        }
    return facts
