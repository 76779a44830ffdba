"""The server's live page: models and versions, who gets which share, throughput, latency and queues as plots.

    GET /dashboard          the page: one file that holds nothing and fetches nothing from elsewhere
    GET /dashboard/state    what it shows, as JSON; the page asks once a second and keeps the last minutes itself

Counters only grow; the page takes differences. Where tokens are asked for, the page asks its reader for one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from trueline.serve.counters import BOUNDS_S, ServerStats
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Servable
from trueline.web.messages import JSON, Response

HTML = b"text/html; charset=utf-8"
# The page is one file with its style and script inside; it may talk to the server it came from, and to nobody else.
_HEADERS = (
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    b"connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'\r\n"
    b"cache-control: no-cache\r\nx-content-type-options: nosniff\r\n"
)


@cache
def _read(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


def page() -> Response:
    """The page itself."""
    return Response(200, _read("dashboard.html"), HTML, _HEADERS)


def try_page() -> Response:
    """GET /try: asks the port it came from what its OpenAPI document says that it answers; made of one file as well."""
    return Response(200, _read("try.html"), HTML, _HEADERS)


def answer(models: Models, stats: ServerStats, now: float) -> Response:
    """What the page shows."""
    return Response(200, msgspec.json.encode(state(models, stats, now)), JSON, b"cache-control: no-store\r\n")


def state(models: Models, stats: ServerStats, now: float) -> dict[str, Any]:
    """Everything that is served at `now`, in seconds since the epoch. Counts and seconds are sums since the start."""
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


def _version(version: Servable, share: float) -> dict[str, Any]:
    stats = version.stats
    found: dict[str, Any] = {
        "version": version.version,
        "state": version.state,
        "reason": version.reason,
        "share": share,
        "since": version.since,
        "waiting": version.num_waiting,
        "requests": stats.request_s.count,
        "failed": stats.failed,
        "latency_cells": stats.request_s.cells,
        "request_s": stats.request_s.total,
        "queue_s": stats.queue_s,
        "infer_s": stats.infer_s,
        "rows": stats.rows,
        "runs": stats.batch_s.count,
    }
    if version.state == "ready" and version.handler is not None:
        found |= {"digest": version.digest, "platform": "torchserve_archive", "workers": version.policy.lanes}
    elif version.state == "ready":
        loaded = version.program.loaded
        found |= {
            "digest": loaded.digest,
            "platform": loaded.platform,
            "golden_cases": loaded.golden_cases,
            "batching": loaded.plan.batch,
            "batching_reason": loaded.plan.why,
            "max_batch": loaded.plan.max_batch,
            "workers": version.policy.lanes,
            "run_us": {str(rows): seconds * 1e6 for rows, seconds in loaded.plan.latency_s.items()},
        }
    return found
