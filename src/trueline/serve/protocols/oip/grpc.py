"""The Open Inference Protocol over gRPC, with Triton's extensions. Imported only where gRPC is served.

Tensors arrive as raw bytes or typed contents and leave as raw bytes. A client error is INVALID_ARGUMENT, an unknown
model NOT_FOUND, a full queue RESOURCE_EXHAUSTED, a loading version UNAVAILABLE. The call's deadline applies from the
queue on; a cancelled call withdraws its request. Source: open_inference_grpc.proto, Triton's grpc_service.proto.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

import grpc

from trueline.bundle.signature import Signature
from trueline.errors import MethodNotAllowed, RequestError
from trueline.serve.offload.process import LONG_BYTES
from trueline.serve.protocols import grpc_base
from trueline.serve.protocols.dispatch import KEY_HEADER
from trueline.serve.protocols.grpc_base import Context, header
from trueline.serve.protocols.oip import triton as extensions
from trueline.serve.protocols.oip.grpc_tensors import LongRequest, decode_long, parse, read_inputs, write_outputs
from trueline.serve.protocols.router import Routes
from trueline.serve.tensors import codec
from trueline.web.access_log import AccessLog
from trueline.web.auth import Keys, TokenKind
from trueline.wire import inference_pb2 as pb

if TYPE_CHECKING:
    pass

LONG_MESSAGE_BYTES = 2**20
"""A longer message is read beside the loop, whatever it holds."""
InferRequest = pb.ModelInferRequest | LongRequest
SERVICE = "inference.GRPCInferenceService"
_REGIONS = tuple(
    f"{kind}SharedMemory{act}" for kind in ("System", "Cuda") for act in ("Status", "Register", "Unregister")
)
_OPEN = frozenset({"ServerLive", "ServerReady"})
_MANAGED = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})


def _text(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)


def _output_names(request: pb.ModelInferRequest, signature: Signature) -> tuple[str, ...]:
    known = tuple(spec.name for spec in signature.outputs)
    names = tuple(output.name for output in request.outputs)
    codec.check_count(len(names), len(known), "outputs", "gives")
    for output in request.outputs:
        codec.check_name(output.name, "an output")
        codec.check_no_region(f"output '{output.name}'", output.parameters)
        codec.check_no_classes(output.name, {key: _text(value) for key, value in output.parameters.items()})
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names):
        raise RequestError(f"unexpected inference output '{(unknown or list(names))[0][: codec.MAX_NAME]}'")
    return names or known


class OipService:
    """The service's methods, on the Routes that HTTP uses."""

    def __init__(self, routes: Routes, keys: Keys | None, log: AccessLog | None = None) -> None:
        self._routes = routes
        self._models = routes.models
        self._keys = keys
        self._interceptor = grpc_base.AuthInterceptor(
            service=SERVICE, check=self._check, log=log, in_flight=routes.dispatch.in_flight
        )

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The methods under the protocol's name; callers need a token."""
        unary: dict[str, tuple[Any, Callable[[Any, Context], Awaitable[Any]]]] = {
            "ServerLive": (pb.ServerLiveRequest, self._live),
            "ServerReady": (pb.ServerReadyRequest, self._ready),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, self._config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._statistics),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self._load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._unload),
        }
        methods = {name: self._interceptor.unary(name, kind, answer) for name, (kind, answer) in unary.items()}
        methods["ModelInfer"] = self._interceptor.unary("ModelInfer", self._read, self._infer)
        methods["ModelStreamInfer"] = self._interceptor.bidirectional(
            "ModelStreamInfer", self._read, self._stream, _encode_error
        )
        for name in _REGIONS:  # the message is not read
            methods[name] = self._interceptor.unary(name, pb.ServerLiveRequest, _refuse_region)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _check(self, name: str, context: Context) -> None:
        if self._keys is None or name in _OPEN or name in _REGIONS:
            return
        kind: TokenKind = "management" if name in _MANAGED else "inference"
        self._keys.check(kind, header(context, "authorization"))

    # requests

    async def _read(self, data: bytes) -> InferRequest:
        """A message with raw bytes is copied, one with typed contents is read value by value."""
        if len(data) <= LONG_MESSAGE_BYTES:
            request = parse(data)
            if request.raw_input_contents or len(data) <= LONG_BYTES:
                return request
        text, inputs = await self._routes.dispatch.offload.run(decode_long, data, num_bytes=len(data))
        return LongRequest(pb.ModelInferRequest.FromString(text), inputs)

    async def _infer(self, given: InferRequest, context: Context) -> pb.ModelInferResponse:
        began = perf_counter()
        request = given.message if isinstance(given, LongRequest) else given
        key = header(context, KEY_HEADER.decode())
        version = self._models.find(
            request.model_name, request.model_version or None, "" if key is None else key.decode("latin-1")
        )
        inputs = given.inputs if isinstance(given, LongRequest) else read_inputs(request)
        names = _output_names(request, version.program.signature)
        parameters = {name: _text(value) for name, value in request.parameters.items()}
        timeout_s = codec.timeout_s(parameters)
        left_s = context.time_remaining()
        limits = [seconds for seconds in (timeout_s, left_s) if seconds is not None]
        version.stats.decode_s += perf_counter() - began
        urgent = parameters.get("priority", header(context, codec.PRIORITY_HEADER.decode()))
        answer = version.ask(inputs, min(limits, default=None), codec.priority(urgent))
        outputs = answer if isinstance(answer, dict) else await answer
        run = perf_counter()
        response = write_outputs(version, request, names, outputs)
        self._routes.dispatch.count_answer(version, inputs, outputs, began, run)
        return response

    async def _stream(self, request: InferRequest, context: Context) -> AsyncIterator[pb.ModelStreamInferResponse]:
        yield pb.ModelStreamInferResponse(infer_response=await self._infer(request, context))

    # metadata

    async def _live(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._routes.dispatch.ready)

    async def _model_ready(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        why = self._routes.dispatch.obstacle(request.name, request.version or None)
        return pb.ModelReadyResponse(ready=not why)

    async def _server_metadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name="trueline", version=metadata.version("trueline"), extensions=extensions.EXTENSIONS
        )

    async def _model_metadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        servable = self._models.find(request.name, request.version or None)
        described = extensions.describe(servable, self._models.versions(servable.model))
        del described["parameters"]
        return pb.ModelMetadataResponse(**described)

    async def _config(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        described = extensions.configuration(self._models.find(request.name, request.version or None))
        names = ("name", "platform", "backend", "max_batch_size", "input", "output")
        config = pb.ModelConfig(**{name: described[name] for name in names})
        if "dynamic_batching" in described:
            config.dynamic_batching.SetInParent()
        return pb.ModelConfigResponse(config=config)

    async def _statistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        response = pb.ModelStatisticsResponse()
        statistics = extensions.statistics(self._models, request.name or None, request.version or None)
        for described in statistics["model_stats"]:
            del described["memory_usage"]
            response.model_stats.add(**described)
        return response

    # the repository

    async def _index(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        index = extensions.index(self._models.all(), ready_only=request.ready)
        return pb.RepositoryIndexResponse(models=[pb.RepositoryIndexResponse.ModelIndex(**entry) for entry in index])

    async def _load(self, request: pb.RepositoryModelLoadRequest, context: Context) -> pb.RepositoryModelLoadResponse:
        given = dict.fromkeys(request.parameters, True)
        await self._routes.oip.repository.load(request.model_name, given)
        return pb.RepositoryModelLoadResponse()

    async def _unload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await self._routes.oip.repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


async def _refuse_region(request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
    raise MethodNotAllowed(f"shared-memory regions are not supported; {codec.NO_REGIONS}")


def _encode_error(request: InferRequest, code: grpc.StatusCode, message: str) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=request.id))
