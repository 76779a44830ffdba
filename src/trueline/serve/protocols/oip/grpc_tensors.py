"""The tensors of gRPC's infer messages. Imports no gRPC: long messages are read in a process of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES
from trueline.errors import RequestError
from trueline.serve.tensors import arrays, codec
from trueline.wire import inference_pb2 as pb

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.serve.models.servable import Servable

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


class LongRequest(msgspec.Struct, frozen=True):
    """A request whose tensors were read apart from its `message`."""

    message: pb.ModelInferRequest
    inputs: dict[str, Array]

    @property
    def model_name(self) -> str:
        return self.message.model_name

    @property
    def id(self) -> str:
        return self.message.id


def parse(data: bytes) -> pb.ModelInferRequest:
    """Raises RequestError."""
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise RequestError("the call's bytes are no ModelInferRequest") from error


def decode_long(data: bytes) -> tuple[bytes, dict[str, Array]]:
    """The bytes of a message without its tensors, and these. Raises RequestError."""
    request = parse(bytes(data))
    inputs = read_inputs(request)
    del request.raw_input_contents[:]
    for given in request.inputs:
        given.ClearField("contents")
    return request.SerializeToString(), inputs


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
