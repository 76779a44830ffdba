"""TorchServe's gRPC services, over the HTTP routes of the same calls. Only translates; imported for servers with gRPC.

    InferenceAPIsService   Ping, Predictions, StreamPredictions, StreamPredictions2
    ManagementAPIsService  DescribeModel, ListModels, RegisterModel, ScaleWorker, SetDefault, UnregisterModel

Fields that the client did not set have their defaults. Statuses are those of the Open Inference Protocol's service (an
unknown model is NOT_FOUND, a full queue RESOURCE_EXHAUSTED); with `strict` they are TorchServe's, which answers
INTERNAL for an unknown model and one without workers. Source: TorchServe 0.12's inference.proto and management.proto,
as the contract page has them; see wire/torchserve.proto.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

import grpc
import msgspec

from trueline.errors import NotReady, RequestError
from trueline.serve.handlers import sequences
from trueline.serve.handlers.failures import HandlerFailed
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest
from trueline.serve.protocols import grpc_base
from trueline.serve.protocols.dispatch import KEY_HEADER, BytesInFlight
from trueline.serve.protocols.grpc_base import Context, header
from trueline.serve.protocols.router import Routes
from trueline.torchserve import responses
from trueline.torchserve.management import Management
from trueline.web.access_log import AccessLog
from trueline.web.auth import Keys, TokenKind
from trueline.web.messages import Request, Response, StreamBroken
from trueline.wire import torchserve_pb2 as pb

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"
_RETRY_AFTER = re.compile(rb"^retry-after: ([0-9]+)\r$", re.MULTILINE)
_NO_NAME = "Parameter model_name is required."
_WHOLE = ("data", "body")
"""Names of a single input that is the whole body over HTTP."""
_MANAGED: dict[str, tuple[type[Any], str, set[str] | None]] = {
    "DescribeModel": (pb.DescribeModelRequest, "GET", {"customized"}),
    "ListModels": (pb.ListModelsRequest, "GET", {"limit", "next_page_token"}),
    "RegisterModel": (pb.RegisterModelRequest, "POST", None),
    "ScaleWorker": (pb.ScaleWorkerRequest, "PUT", {"min_worker", "max_worker", "synchronous"}),
    "SetDefault": (pb.SetDefaultRequest, "PUT", set()),
    "UnregisterModel": (pb.UnregisterModelRequest, "DELETE", set()),
}
"""Calls of the management API: request, HTTP method, and the fields that go into the query (None: all)."""


class _Refused(NotReady):
    """An error response of the HTTP route."""

    code = "refused"

    def __init__(self, response: Response) -> None:
        body = msgspec.json.decode(response.body, type=dict[str, Any])
        wait = _RETRY_AFTER.search(response.headers)
        message = str(body.get("message") or body.get("error") or "refused")
        super().__init__(message, retry_after_s=None if wait is None else float(wait[1]))
        self.status = response.status


def _interceptor(
    kind: TokenKind, keys: Keys | None, log: AccessLog | None, in_flight: BytesInFlight, *, strict: bool
) -> grpc_base.AuthInterceptor:
    """Checks tokens and translates refusals to statuses."""

    def check(name: str, context: Context) -> None:
        if keys is not None and name != "Ping":
            keys.check(kind, header(context, "authorization"))

    def code(error: RequestError) -> grpc.StatusCode:
        if strict and not isinstance(error, HandlerFailed):
            if error.status == 401:
                return grpc.StatusCode.PERMISSION_DENIED
            if kind == "inference" and (error.status in (404, 503) or error.message == _NO_NAME):
                return grpc.StatusCode.INTERNAL
        return grpc_base.code_of(error)

    service, face = (INFERENCE, "grpc") if kind == "inference" else (MANAGEMENT, "grpc_management")
    return grpc_base.AuthInterceptor(service=service, check=check, code=code, log=log, face=face, in_flight=in_flight)


class Inference:
    """The inference service."""

    def __init__(
        self, routes: Routes, keys: Keys | None, log: AccessLog | None = None, *, strict: bool = False
    ) -> None:
        self._routes, self._strict = routes, strict
        self._calls = _interceptor("inference", keys, log, routes.dispatch.in_flight, strict=strict)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service under TorchServe's name."""
        calls, request = self._calls, pb.PredictionsRequest
        return grpc.method_handlers_generic_handler(
            INFERENCE,
            {
                "Ping": calls.unary("Ping", pb.Nothing, self._ping),
                "Predictions": calls.unary("Predictions", request, self._predictions),
                "StreamPredictions": calls.server_stream("StreamPredictions", request, self._stream),
                "StreamPredictions2": calls.bidirectional(
                    "StreamPredictions2", request, partial(self._stream, named=True), _encode_refusal
                ),
            },
        )

    async def _ping(self, request: pb.Nothing, context: Context) -> pb.HealthResponse:
        healthy = responses.is_healthy(self._routes.dispatch, strict=self._strict)
        return pb.HealthResponse(health="Healthy" if healthy else "Unhealthy")

    async def _predictions(self, request: pb.PredictionsRequest, context: Context) -> pb.PredictionResponse:
        answer = await self._ask(request, context)
        with _broken_stream_as_failure():
            body = bytes(answer.body) if answer.pieces is None else await answer.pieces.whole()
        return pb.PredictionResponse(prediction=body, sequence_id=_sequence_of(request, answer))

    async def _stream(
        self, request: pb.PredictionsRequest, context: Context, *, named: bool = False
    ) -> AsyncIterator[pb.PredictionResponse]:
        """`named`: a request to a stateful model has to name its sequence."""
        answer = await self._ask(request, context, named=named)
        name = _sequence_of(request, answer)
        if answer.pieces is None:
            yield pb.PredictionResponse(prediction=bytes(answer.body), sequence_id=name)
            return
        with _broken_stream_as_failure():
            async for piece in answer.pieces.each():
                yield pb.PredictionResponse(prediction=bytes(piece), sequence_id=name)

    async def _ask(self, request: pb.PredictionsRequest, context: Context, *, named: bool = False) -> HandlerAnswer:
        if not request.model_name:
            raise RequestError(_NO_NAME)
        key = header(context, KEY_HEADER.decode())
        found = self._routes.models.find(
            request.model_name,
            request.model_version or None,
            request.sequence_id if key is None else key.decode("latin-1"),
        )
        if (handler := found.handler) is not None:
            known = request.sequence_id or sequences.START in request.input
            if named and not known and handler.stateful:
                raise RequestError("Parameter sequenceId is required.", hint=f"or the input {sequences.START}")
            parts = [(name, "", value) for name, value in request.input.items()]
            headers = {"explain": "False"} | _sequence_headers(request)
            return await handler.handle(HandlerRequest(request_id=str(uuid4()), parts=parts, headers=headers))
        path = f"/predictions/{quote(found.model, safe='')}/{quote(found.version, safe='')}"
        body = _encode_body(request.input)
        response = await _resolve(self._routes.handle_uncached(Request("POST", path.encode(), {}, body)))
        return HandlerAnswer(body=response.body)


@contextmanager
def _broken_stream_as_failure() -> Iterator[None]:
    try:
        yield
    except StreamBroken as error:
        raise HandlerFailed("the answer broke off: its handler failed") from error


def _encode_body(given: Mapping[str, bytes]) -> bytes:
    """The body of the same request over HTTP: the only value, or an object of values by name.

    >>> _encode_body({"data": b"[1, 2]"}), _encode_body({"x": b"[1]", "y": b"[2]"})
    (b'[1, 2]', b'{"x":[1],"y":[2]}')
    """
    if len(given) == 1 and next(iter(given)) in _WHOLE:
        return next(iter(given.values()))
    return msgspec.json.encode({name: msgspec.Raw(value or b"null") for name, value in given.items()})


def _sequence_headers(request: pb.PredictionsRequest) -> dict[str, str]:
    """The headers of the same request over HTTP: the id is a field here, begin and end are inputs."""
    marks = {name: request.input[name] for name in (sequences.START, sequences.END) if name in request.input}
    headers = {name: value.decode("utf-8", "replace") for name, value in marks.items()}
    return headers | ({sequences.ID: request.sequence_id} if request.sequence_id else {})


def _sequence_of(request: pb.PredictionsRequest, answer: HandlerAnswer) -> str:
    """The sequence that the answer names, which may be new."""
    return answer.headers.get(sequences.ID, request.sequence_id)


async def _resolve(found: Response | asyncio.Future[Response]) -> Response:
    """Raises _Refused for an error response."""
    response = found if isinstance(found, Response) else await found
    if response.status < 400:
        return response
    raise _Refused(response)


def _encode_refusal(request: pb.PredictionsRequest, code: grpc.StatusCode, message: str) -> pb.PredictionResponse:
    status = pb.Status(code=int(code.value[0]), message=message)
    return pb.PredictionResponse(sequence_id=request.sequence_id, status=status)


class Managed:
    """The management service; each call is the request of the HTTP API that does the same."""

    def __init__(
        self, management: Management, keys: Keys | None, log: AccessLog | None = None, *, strict: bool = False
    ) -> None:
        self._management = management
        self._calls = _interceptor("management", keys, log, BytesInFlight(), strict=strict)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service under TorchServe's name."""
        calls = {
            name: self._calls.unary(name, kind, partial(self._call, name)) for name, (kind, _, _) in _MANAGED.items()
        }
        return grpc.method_handlers_generic_handler(MANAGEMENT, calls)

    async def _call(self, name: str, request: Any, context: Context) -> pb.ManagementResponse:
        """Returns the HTTP API's status text, or its whole description."""
        _, method, fields = _MANAGED[name]
        path = "/models" if name in ("ListModels", "RegisterModel") else _path_of(request)
        if name == "SetDefault":
            if not request.model_version:
                raise RequestError("Parameter model_version is required.")
            path += "/set-default"
        query = urlencode(_set_fields(request, fields))
        target = f"{path}?{query}" if query else path
        response = await _resolve(self._management.answer(Request(method, target.encode(), {}, b"")))
        body = msgspec.json.decode(response.body)
        if isinstance(body, dict) and set(body) == {"status"}:
            return pb.ManagementResponse(msg=body["status"])
        return pb.ManagementResponse(msg=response.body.decode())


def _path_of(request: Any) -> str:
    """The path of the model that a request names. Raises RequestError."""
    if not request.model_name:
        raise RequestError(_NO_NAME)
    path = f"/models/{quote(request.model_name, safe='')}"
    return f"{path}/{quote(request.model_version, safe='')}" if request.model_version else path


def _set_fields(request: Any, names: set[str] | None) -> dict[str, str]:
    """The fields that the client set, as values of a query."""
    return {
        field.name: str(value).lower() if isinstance(value, bool) else str(value)
        for field, value in request.ListFields()
        if names is None or field.name in names
    }
