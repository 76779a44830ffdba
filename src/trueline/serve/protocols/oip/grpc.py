"""The Open Inference Protocol over gRPC, with Triton's extensions. Imported only where gRPC is served.

Tensors arrive as raw bytes or typed contents and leave as raw bytes. A client error is INVALID_ARGUMENT, an unknown
model NOT_FOUND, a full queue RESOURCE_EXHAUSTED, a loading version UNAVAILABLE. The call's deadline applies from the
queue on; a cancelled call withdraws its request. Source: open_inference_grpc.proto, Triton's grpc_service.proto.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature
from trueline.errors import MethodNotAllowed, RequestError
from trueline.serve.models.servable import Servable
from trueline.serve.protocols import grpc_base
from trueline.serve.protocols.dispatch import KEY_HEADER
from trueline.serve.protocols.grpc_base import Context, header
from trueline.serve.protocols.oip import triton as extensions
from trueline.serve.protocols.router import Routes
from trueline.serve.tensors import arrays, codec
from trueline.web.access_log import AccessLog
from trueline.web.auth import Keys, TokenKind
from trueline.wire import inference_pb2 as pb

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

SERVICE = "inference.GRPCInferenceService"
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
MAX_INPUTS = 4096
"""No model has more; each costs more than its bytes (CVE-2026-47628)."""
_REGIONS = tuple(
    f"{kind}SharedMemory{act}" for kind in ("System", "Cuda") for act in ("Status", "Register", "Unregister")
)
_OPEN = frozenset({"ServerLive", "ServerReady"})
_MANAGED = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})


def _text(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Array]:
    """The request's tensors by name. Raises RequestError."""
    raw = request.raw_input_contents
    if len(request.inputs) > MAX_INPUTS:
        raise RequestError(f"the request has {len(request.inputs)} inputs, at most {MAX_INPUTS} are allowed")
    for given in request.inputs:
        codec.check_name(given.name, "an input")
        codec.check_no_region(f"input '{given.name}'", given.parameters)
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"expected {len(request.inputs)} raw_input_contents, one for each input, got {len(raw)}")
    inputs: dict[str, Array] = {}
    for i, given in enumerate(request.inputs):
        if given.name in inputs:
            raise RequestError(f"input '{given.name}' is given twice")
        if given.datatype not in NUMPY_DTYPES:
            raise RequestError(f"input '{given.name}' has datatype {given.datatype[:32]}, which no model here takes")
        if len(given.shape) > arrays.MAX_DEPTH or not all(0 <= size < 2**31 for size in given.shape):
            raise RequestError(f"input '{given.name}' has a shape that no tensor has: {list(given.shape)[:8]}")
        if raw and given.HasField("contents"):
            raise RequestError(f"input '{given.name}' has contents beside raw_input_contents")
        if raw:
            inputs[given.name] = arrays.array_of(given.name, given.datatype, given.shape, raw[i])
        else:
            inputs[given.name] = _from_contents(given)
    return inputs


def _from_contents(given: pb.ModelInferRequest.InferInputTensor) -> Array:
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise RequestError(f"input '{given.name}' is {given.datatype}, which is sent in raw_input_contents only")
    values = getattr(given.contents, field)
    dtype = NUMPY_DTYPES[given.datatype]
    wide = np.array(values, dtype=dtype if dtype.kind in "fb" else np.int64 if dtype.kind == "i" else np.uint64)
    size = int(np.prod([1, *given.shape], dtype=object))
    if wide.size != size:
        raise RequestError(f"input '{given.name}' has {wide.size} {field}, its shape {list(given.shape)} says {size}")
    array = wide.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(array, wide):
        raise RequestError(f"input '{given.name}' has a value out of the range of {given.datatype}")
    return array.reshape(tuple(given.shape))


def write_outputs(
    version: Servable, request: pb.ModelInferRequest, names: Iterable[str], outputs: dict[str, Array]
) -> pb.ModelInferResponse:
    """The response, its tensors as raw bytes."""
    response = pb.ModelInferResponse(model_name=version.model, model_version=version.version, id=request.id)
    for name in names:
        array = outputs[name]
        response.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        response.raw_output_contents.append(bytes(arrays.as_bytes(name, array)))
    return response


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
        self._interceptor = grpc_base.AuthInterceptor(service=SERVICE, check=self._check, log=log)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The methods under the protocol's name; callers need a token."""
        unary: dict[str, tuple[Any, Callable[[Any, Context], Awaitable[Any]]]] = {
            "ServerLive": (pb.ServerLiveRequest, self._live),
            "ServerReady": (pb.ServerReadyRequest, self._ready),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata),
            "ModelInfer": (pb.ModelInferRequest, self._infer),
            "ModelConfig": (pb.ModelConfigRequest, self._config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._statistics),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self._load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._unload),
        }
        methods = {name: self._interceptor.unary(name, kind, answer) for name, (kind, answer) in unary.items()}
        methods["ModelStreamInfer"] = self._interceptor.bidirectional(
            "ModelStreamInfer", pb.ModelInferRequest, self._stream, _encode_error
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

    async def _infer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        began = perf_counter()
        key = header(context, KEY_HEADER.decode())
        version = self._models.find(
            request.model_name, request.model_version or None, "" if key is None else key.decode("latin-1")
        )
        inputs, names = read_inputs(request), _output_names(request, version.program.signature)
        parameters = {name: _text(value) for name, value in request.parameters.items()}
        timeout_s = codec.timeout_s(parameters)
        left_s = context.time_remaining()
        limits = [seconds for seconds in (timeout_s, left_s) if seconds is not None]
        version.stats.decode_s += perf_counter() - began
        given = parameters.get("priority", header(context, codec.PRIORITY_HEADER.decode()))
        answer = version.ask(inputs, min(limits, default=None), codec.priority(given))
        outputs = answer if isinstance(answer, dict) else await answer
        run = perf_counter()
        response = write_outputs(version, request, names, outputs)
        self._routes.dispatch.count_answer(version, inputs, outputs, began, run)
        return response

    async def _stream(
        self, request: pb.ModelInferRequest, context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
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


def _encode_error(request: pb.ModelInferRequest, code: grpc.StatusCode, message: str) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=request.id))
