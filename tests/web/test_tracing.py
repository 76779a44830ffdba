"""One span for each request, under the parent that came with it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from trueline.errors import UsageError
from trueline.web import tracing
from trueline.web.messages import Request, Response
from worlds.servers import Answers

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(answer: Any) -> tuple[tracing.TracingMiddleware, Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return tracing.TracingMiddleware(Answers(answer), provider.get_tracer("t")), kept


def request(traceparent: str | None = None) -> Request:
    headers = {} if traceparent is None else {b"traceparent": traceparent.encode()}
    return Request("POST", b"/v2/models/tiny/infer?x=1", headers, b"")


def test_the_parent_that_comes_with_a_request_is_the_parent_of_its_span() -> None:
    app, kept = traced(Response(200, b""))
    app.answer(request(f"00-{TRACE}-{SPAN}-01"))
    (span,) = kept.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.attributes["url.path"] == "/v2/models/tiny/infer"
    assert span.attributes["http.response.status_code"] == 200


def test_a_parent_that_is_not_sampled_leaves_no_span() -> None:
    app, kept = traced(Response(200, b""))
    assert app.answer(request(f"00-{TRACE}-{SPAN}-00")).status == 200
    assert kept.get_finished_spans() == ()


@pytest.mark.parametrize("given", [None, "nonsense", f"00-{'0' * 32}-{SPAN}-01"])
def test_without_a_good_parent_a_trace_begins_here(given: str | None) -> None:
    app, kept = traced(Response(503, b""))
    app.answer(request(given))
    (span,) = kept.get_finished_spans()
    assert span.parent is None
    assert not span.status.is_ok


def test_a_span_ends_with_the_answer_or_with_the_client() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        for end, said in ((lambda one: one.set_result(Response(200, b"")), 200), (lambda one: one.cancel(), None)):
            later: asyncio.Future[Response] = loop.create_future()
            app, kept = traced(later)
            assert app.answer(request()) is later
            assert kept.get_finished_spans() == ()
            end(later)
            await asyncio.sleep(0)
            (span,) = kept.get_finished_spans()
            assert span.attributes.get("http.response.status_code") == said

    asyncio.run(scene())


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError, match="needs OpenTelemetry") as caught:
        tracing.make_tracer_provider("http://127.0.0.1:4318")
    assert "trueline[otel]" in caught.value.hint
