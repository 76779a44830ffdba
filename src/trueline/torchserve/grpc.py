"""TorchServe's gRPC services, over what its HTTP routes use. Only translates; imported where it is asked for.

    InferenceAPIsService   Ping, Predictions, StreamPredictions, StreamPredictions2
    ManagementAPIsService  DescribeModel, ListModels, RegisterModel, ScaleWorker, SetDefault, UnregisterModel

A field that the client did not set is as if it were not there, and has its default. Statuses are those of the protocol
beside it (an unknown model is NOT_FOUND, a full queue RESOURCE_EXHAUSTED); with `strict` they are TorchServe's, which
answers INTERNAL for an unknown model and one without workers. Source: TorchServe 0.12's inference.proto and
management.proto, as the contract page has them; see wire/torchserve.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

import grpc
import msgspec

from trueline.errors import RequestError
from trueline.serve.handlers import sequences
from trueline.serve.handlers.worker import HandlerFailed
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest, Servable
from trueline.serve.protocols import grpc_base
from trueline.serve.protocols.dispatch import KEY_HEADER
from trueline.serve.protocols.grpc_base import Context, header
from trueline.serve.protocols.router import Routes
from trueline.torchserve.management import Management
from trueline.web.access_log import AccessLog
from trueline.web.auth import Keys, TokenKind
from trueline.web.messages import Request, Response
from trueline.web.streaming import StreamBroken
from trueline.wire import torchserve_pb2 as pb

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"
_WHOLE = ("data", "body")
"""Names under which clients send what is the whole body over HTTP."""


class _Refused(RequestError):
    """What HTTP would have answered."""

    code = "refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _interceptor(
    kind: TokenKind, keys: Keys | None, log: AccessLog | None, *, strict: bool
) -> grpc_base.AuthInterceptor:
    """Who may call, and what a refusal is called."""

    def check(name: str, context: Context) -> None:
        if keys is not None and name != "Ping":
            keys.check(kind, header(context, "authorization"))

    def code(error: RequestError) -> grpc.StatusCode:
        if not strict or isinstance(error, HandlerFailed):
            return grpc_base.code_of(error)
        if error.status == 401:
            return grpc.StatusCode.PERMISSION_DENIED
        if kind == "inference" and error.status in (404, 503):
            return grpc.StatusCode.INTERNAL
        return grpc_base.code_of(error)

    if kind == "inference":
        return grpc_base.AuthInterceptor(service=INFERENCE, check=check, code=code, log=log)
    return grpc_base.AuthInterceptor(service=MANAGEMENT, check=check, code=code, log=log, face="grpc_management")


class Inference:
    """What is asked of models."""

    def __init__(
        self, routes: Routes, keys: Keys | None, log: AccessLog | None = None, *, strict: bool = False
    ) -> None:
        self._routes = routes
        self._interceptor = _interceptor("inference", keys, log, strict=strict)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service under TorchServe's name."""
        interceptor, asked = self._interceptor, pb.PredictionsRequest
        return grpc.method_handlers_generic_handler(
            INFERENCE,
            {
                "Ping": interceptor.unary("Ping", pb.Nothing, self._ping),
                "Predictions": interceptor.unary("Predictions", asked, self._predictions),
                "StreamPredictions": interceptor.server_stream("StreamPredictions", asked, self._stream),
                "StreamPredictions2": interceptor.bidirectional("StreamPredictions2", asked, self._sequence, _told),
            },
        )

    async def _ping(self, request: pb.Nothing, context: Context) -> pb.HealthResponse:
        return pb.HealthResponse(health="Unhealthy" if self._routes.dispatch.sick else "Healthy")

    async def _predictions(self, request: pb.PredictionsRequest, context: Context) -> pb.PredictionResponse:
        answer = await self._ask(request, context)
        body = bytes(answer.body) if answer.pieces is None else await _whole(answer)
        return pb.PredictionResponse(prediction=body, sequence_id=_sequence_of(request, answer))

    async def _stream(
        self, request: pb.PredictionsRequest, context: Context, *, named: bool = False
    ) -> AsyncIterator[pb.PredictionResponse]:
        """`named`: a request of a stateful model is to name its sequence."""
        answer = await self._ask(request, context, named=named)
        name = _sequence_of(request, answer)
        if answer.pieces is None:
            yield pb.PredictionResponse(prediction=bytes(answer.body), sequence_id=name)
            return
        try:
            async for piece in answer.pieces.each():
                yield pb.PredictionResponse(prediction=bytes(piece), sequence_id=name)
        except StreamBroken as error:
            raise HandlerFailed("the answer broke off: its handler failed") from error

    def _sequence(self, request: pb.PredictionsRequest, context: Context) -> AsyncIterator[pb.PredictionResponse]:
        return self._stream(request, context, named=True)

    async def _ask(self, request: pb.PredictionsRequest, context: Context, *, named: bool = False) -> HandlerAnswer:
        if not request.model_name:
            raise RequestError("Parameter model_name is required.")
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
            headers = {"explain": "False"} | _in_sequence(request)
            return await handler.handle(HandlerRequest(request_id=str(uuid4()), parts=parts, headers=headers))
        return await self._ask_bundle(found, request.input)

    async def _ask_bundle(self, version: Servable, given: Mapping[str, bytes]) -> HandlerAnswer:
        path = f"/predictions/{quote(version.model, safe='')}/{quote(version.version, safe='')}"
        response = await _answered(self._routes.handle_uncached(Request("POST", path.encode(), {}, _body(given))))
        return HandlerAnswer(body=response.body)


def _body(given: Mapping[str, bytes]) -> bytes:
    """The body that says the same over HTTP: the only value, or an object of values by name.

    >>> _body({"data": b"[1, 2]"}), _body({"x": b"[1]", "y": b"[2]"})
    (b'[1, 2]', b'{"x":[1],"y":[2]}')
    """
    if len(given) == 1 and next(iter(given)) in _WHOLE:
        return next(iter(given.values()))
    return msgspec.json.encode({name: msgspec.Raw(value or b"null") for name, value in given.items()})


def _in_sequence(request: pb.PredictionsRequest) -> dict[str, str]:
    """What HTTP says in headers: the id has a field of its own, begin and end are inputs."""
    found = {sequences.ID: request.sequence_id} if request.sequence_id else {}
    for name in (sequences.START, sequences.END):
        if name in request.input:
            found[name] = request.input[name].decode("utf-8", "replace")
    return found


def _sequence_of(request: pb.PredictionsRequest, answer: HandlerAnswer) -> str:
    """The sequence that the answer names, as one may just have begun."""
    return answer.headers.get(sequences.ID, request.sequence_id)


async def _answered(found: Response | asyncio.Future[Response]) -> Response:
    """Raises _Refused for an answer that is none."""
    response = found if isinstance(found, Response) else await found
    if response.status < 400:
        return response
    told = msgspec.json.decode(response.body, type=dict[str, Any])
    raise _Refused(response.status, str(told.get("message") or told.get("error") or "refused"))


async def _whole(answer: HandlerAnswer) -> bytes:
    assert answer.pieces is not None
    try:
        return await answer.pieces.whole()
    except StreamBroken as error:
        raise HandlerFailed("the answer broke off: its handler failed") from error


def _told(request: pb.PredictionsRequest, code: grpc.StatusCode, message: str) -> pb.PredictionResponse:
    status = pb.Status(code=int(code.value[0]), message=message)
    return pb.PredictionResponse(sequence_id=request.sequence_id, status=status)


class Managed:
    """What is done with models; each call is the request of the HTTP API that does the same."""

    def __init__(
        self, management: Management, keys: Keys | None, log: AccessLog | None = None, *, strict: bool = False
    ) -> None:
        self._management = management
        self._interceptor = _interceptor("management", keys, log, strict=strict)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service under TorchServe's name."""
        methods: dict[str, tuple[type[Any], Callable[[Any, Context], Awaitable[Any]]]] = {
            "DescribeModel": (pb.DescribeModelRequest, self._describe),
            "ListModels": (pb.ListModelsRequest, self._list),
            "RegisterModel": (pb.RegisterModelRequest, self._register),
            "ScaleWorker": (pb.ScaleWorkerRequest, self._scale),
            "SetDefault": (pb.SetDefaultRequest, self._set_default),
            "UnregisterModel": (pb.UnregisterModelRequest, self._unregister),
        }
        made = {name: self._interceptor.unary(name, kind, answer) for name, (kind, answer) in methods.items()}
        return grpc.method_handlers_generic_handler(MANAGEMENT, made)

    async def _describe(self, request: pb.DescribeModelRequest, context: Context) -> pb.ManagementResponse:
        return await self._do("GET", _of(request), _given(request, {"customized"}))

    async def _list(self, request: pb.ListModelsRequest, context: Context) -> pb.ManagementResponse:
        return await self._do("GET", "/models", _given(request, {"limit", "next_page_token"}))

    async def _register(self, request: pb.RegisterModelRequest, context: Context) -> pb.ManagementResponse:
        return await self._do("POST", "/models", _given(request))

    async def _scale(self, request: pb.ScaleWorkerRequest, context: Context) -> pb.ManagementResponse:
        return await self._do("PUT", _of(request), _given(request, {"min_worker", "max_worker", "synchronous"}))

    async def _set_default(self, request: pb.SetDefaultRequest, context: Context) -> pb.ManagementResponse:
        if not request.model_version:
            raise RequestError("Parameter model_version is required.")
        return await self._do("PUT", f"{_of(request)}/set-default", {})

    async def _unregister(self, request: pb.UnregisterModelRequest, context: Context) -> pb.ManagementResponse:
        return await self._do("DELETE", _of(request), {})

    async def _do(self, method: str, path: str, query: Mapping[str, str]) -> pb.ManagementResponse:
        """What HTTP answers: its status line of words, or the whole description."""
        target = f"{path}?{urlencode(query)}" if query else path
        response = await _answered(self._management.answer(Request(method, target.encode(), {}, b"")))
        told = msgspec.json.decode(response.body)
        if isinstance(told, dict) and set(told) == {"status"}:
            return pb.ManagementResponse(msg=told["status"])
        return pb.ManagementResponse(msg=response.body.decode())


def _of(request: Any) -> str:
    """The path of the model that a request names. Raises RequestError."""
    if not request.model_name:
        raise RequestError("Parameter model_name is required.")
    path = f"/models/{quote(request.model_name, safe='')}"
    return f"{path}/{quote(request.model_version, safe='')}" if request.model_version else path


def _given(request: Any, names: set[str] | None = None) -> dict[str, str]:
    """The fields that the client set, as a query has them."""
    found = {}
    for field, value in request.ListFields():
        if names is None or field.name in names:
            found[field.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found
