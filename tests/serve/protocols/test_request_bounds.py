"""What one request may bring holds in every protocol, and says the value, the bound and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trueline.serve.tensors.bounds import RequestBounds
from worlds.servers import TinyApp

LEAST = RequestBounds(values=30, answer_values=30)
ROW = [1.0, 2.0, 3.0]


@pytest.fixture
def app(tmp_path: Path) -> Iterator[TinyApp]:
    with TinyApp(tmp_path) as made:
        loaded = replace(made.tiny.loaded, bounds=LEAST)
        made.tiny.make_ready(loaded, made.tiny.policy, made.pool, made.loop)
        yield made


def infer(rows: int) -> bytes:
    given = {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": ROW * rows}
    return json.dumps({"inputs": [given]}).encode()


BODIES = {
    "/v2/models/tiny/infer": infer,
    "/v2/models/tiny/versions/1/infer": infer,
    "/v1/models/tiny:predict": lambda rows: json.dumps({"instances": [ROW] * rows}).encode(),
    "/predictions/tiny": lambda rows: json.dumps([ROW] * rows).encode(),
    "/invocations": lambda rows: json.dumps({"inputs": [ROW] * rows}).encode(),
    "/models/tiny/invoke": lambda rows: json.dumps([ROW] * rows).encode(),
}


@pytest.mark.parametrize("path", BODIES)
def test_too_many_numbers_are_a_413_in_every_protocol(app: TinyApp, path: str) -> None:
    assert app.ask("POST", path, BODIES[path](5)).status == 200
    found = app.ask("POST", path, BODIES[path](500))
    assert found.status == 413
    assert b"values, at most 30 are accepted" in found.body
    assert b"--max-values" in found.body


def test_a_form_that_was_answered_before_opens_no_way_past_the_bounds(app: TinyApp) -> None:
    for _ in range(10):
        assert app.ask("POST", "/v2/models/tiny/infer", infer(1)).status == 200
    long = infer(1).replace(b"3.0]", b"3.0" + b", 1.0" * 200_000 + b"]")
    assert app.ask("POST", "/v2/models/tiny/infer", long).status == 413
    assert app.ask("POST", "/v2/models/tiny/infer", infer(500)).status == 413


@pytest.mark.parametrize("kind", ["systemsharedmemory", "cudasharedmemory"])
@pytest.mark.parametrize("rest", ["status", "region/r/status", "region/r/register", "unregister"])
def test_regions_of_shared_memory_are_refused_in_words(app: TinyApp, kind: str, rest: str) -> None:
    method = "GET" if rest.endswith("status") else "POST"
    found = app.ask(method, f"/v2/{kind}/{rest}", b'{"key": "/r", "offset": 0, "byte_size": 64}')
    assert found.status == 404
    assert b"shared-memory regions are not supported" in found.body
