"""One OpenTelemetry span for each request, by the extra `otel`, which is imported only with `--traces`.

A W3C `traceparent` header is the span's parent and decides whether it is sampled; a malformed one is ignored. A thread
exports the spans. Sources: W3C Trace Context; OpenTelemetry's semantic conventions for HTTP servers.
"""

from typing import Any

from trueline.errors import UsageError
from trueline.web.messages import Answer, App, Request, Response

_CARRIED = ("traceparent", "tracestate")


class TracingMiddleware:
    """`app`, with a span of `tracer` for each request."""

    def __init__(self, app: App, tracer: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._kind = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._parent = TraceContextTextMapPropagator().extract

    def answer(self, request: Request) -> Answer:
        """The response of the app; the span ends with it, or when the client has left."""
        carried = {
            name: request.headers[name.encode()].decode("latin-1")
            for name in _CARRIED
            if name.encode() in request.headers
        }
        span = self._tracer.start_span(
            request.method,
            context=self._parent(carried) if carried else None,
            kind=self._kind,
            attributes={"http.request.method": request.method, "url.path": request.path},
        )
        answer = self._app.answer(request)
        if isinstance(answer, Response):
            self._end(span, answer)
        else:
            answer.add_done_callback(lambda done: self._end(span, None if done.cancelled() else done.result()))
        return answer

    def _end(self, span: Any, response: Response | None) -> None:
        if response is None:
            span.set_attribute("error.type", "client_gone")
        else:
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_attribute("error.type", str(response.status))
                span.set_status(self._failed)
        span.end()

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received, of which there is no span."""
        return self._app.refuse(path, status, message)


def make_tracer_provider(endpoint: str) -> Any:
    """Sends spans to the collector at `endpoint`. Raises UsageError when the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            f"--traces {endpoint} needs OpenTelemetry, and {error.name} is not installed",
            hint="pip install 'trueline[otel]'",
        ) from error
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--traces {endpoint} is no URL of a collector such as http://127.0.0.1:4318")
    provider = TracerProvider(resource=Resource.create({"service.name": "trueline"}))
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
