"""Infer requests of the Open Inference Protocol: bytes to arrays, arrays to bytes. Pure; see `arrays` for the tensors.

Client errors are RequestErrors here, or in `Signature.check`, and name the input. Source: the protocol's REST page,
version 2, and docs/guides/serve.md for what it leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature, TensorSpec
from trueline.errors import RequestError, closest, join_names
from trueline.serve.batching.policy import PRIORITIES, USUAL
from trueline.serve.tensors import arrays
from trueline.serve.tensors.bounds import UNBOUNDED, RequestBounds
from trueline.web.body import Body

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


PRIORITY_HEADER = b"x-trueline-priority"
"""1 is the most urgent; the parameter of an infer request takes precedence."""
MAX_NAME = 256
"""Characters of an input's name; a longer one is not echoed."""
MANY_INPUTS = 64
"""Fewer are read and refused one by one, by name."""
REGION = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
NO_REGIONS = "this server reads and writes none: send tensors in the request, as binary data where they are large"
MAX_CACHED = 64
"""Shapes of outputs for which a template caches the JSON of binary answers."""


class GivenInput(msgspec.Struct):
    """An input as a request declares it."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: list[GivenInput]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


class _Tensor(msgspec.Struct, omit_defaults=True):
    name: str
    shape: tuple[int, ...]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class _Answer(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_Tensor]
    id: str | None = None


_REQUEST = msgspec.json.Decoder(_Request)
_ENCODER = msgspec.json.Encoder()
READ = frozenset(
    b"id inputs outputs parameters name shape datatype data timeout priority sequence_id sequence_start sequence_end "
    b"binary_data binary_data_size binary_data_output classification "
    b"shared_memory_region shared_memory_offset shared_memory_byte_size".split()
)
"""Names in a request whose values can change what it means; values of other names are ignored. The fast path goes by
it: a name that is read here from now on belongs here too.
"""
_DATA = b'"data":'
_NO_NUMBERS = _DATA + b"[]"


class InferCall(msgspec.Struct, frozen=True):
    """One decoded request."""

    inputs: dict[str, Array]
    outputs: tuple[str, ...]
    """Names of the outputs of the answer, in order."""
    id: str | None
    timeout_s: float | None
    binary: frozenset[str] = frozenset()
    """Names of the outputs that are sent as raw bytes."""
    priority: object = None
    """As the client gave it."""
    json_cache: dict[object, bytes] | None = None
    """The JSON of binary answers by the outputs' datatypes and shapes, shared by all calls of one template."""

    def of(self, inputs: dict[str, Array]) -> InferCall:
        """The same with other `inputs`."""
        return InferCall(inputs, self.outputs, self.id, self.timeout_s, self.binary, self.priority, self.json_cache)


class Encoded(msgspec.Struct, frozen=True):
    """An answer's body, of which the first `json_bytes` are JSON; None: all."""

    body: bytes
    json_bytes: int | None


def decode(
    body: Body, signature: Signature, json_bytes: int | None = None, bounds: RequestBounds = UNBOUNDED
) -> InferCall:
    """The call in an infer request's body, of which the first `json_bytes` are JSON (None: all). Raises RequestError.

    Names and shapes are checked only as far as reading the data needs it; `Signature.check` does the rest.
    """
    return decode_with_inputs(body, signature, json_bytes, bounds)[0]


def decode_with_inputs(
    body: Body, signature: Signature, json_bytes: int | None = None, bounds: RequestBounds = UNBOUNDED
) -> tuple[InferCall, Sequence[GivenInput]]:
    """The same with each input as declared in the JSON; a raw request declares none. Raises TooLarge beyond `bounds`,
    before values are read.
    """
    if json_bytes == 0:
        names = tuple(spec.name for spec in signature.outputs)
        return InferCall(arrays.raw_input(body, signature), names, None, None, frozenset(names)), ()
    bounds.check_text(body, json_bytes)
    tail = None
    if json_bytes is not None:
        tail = arrays.Tail(memoryview(body)[json_bytes:])
        body = bytes(memoryview(body)[:json_bytes])
    try:
        request = _REQUEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no infer request: {error}") from error
    except RecursionError as error:
        raise RequestError("the body nests too deeply") from error
    specs = {spec.name: spec for spec in signature.inputs}
    check_count(len(request.inputs), len(specs))
    inputs: dict[str, Array] = {}
    count = 0
    for given in request.inputs:
        check_name(given.name, "an input")
        check_no_region(f"input '{given.name}'", given.parameters)
        _check_shape(given)
        count += math.prod(given.shape)
        bounds.check_values(count)
        if given.name in inputs:
            raise RequestError(f"input '{given.name}' is given twice")
        inputs[given.name] = _read_input(given, specs.get(given.name), tail)
    if tail is not None:
        tail.check_empty()
    outputs = _check_outputs(request.outputs, signature)
    as_bytes = _binary_outputs(request.outputs, request.parameters, outputs)
    urgent = request.parameters.get("priority") if request.parameters else None
    call = InferCall(inputs, outputs, request.id, timeout_s(request.parameters), as_bytes, urgent)
    return call, request.inputs


def check_count(given: int, known: int, what: str = "inputs", does: str = "takes") -> None:
    """Raises RequestError for far more inputs than the model takes, before they are read (CVE-2026-47628)."""
    if given > max(MANY_INPUTS, known):
        raise RequestError(f"the request has {given} {what}, the model {does} {known}")


def check_name(name: str, what: str) -> None:
    """Raises RequestError for a name that is too long to be repeated in an error."""
    if len(name) > MAX_NAME:
        raise RequestError(f"the name of {what} has {len(name)} characters, at most {MAX_NAME} are allowed")


def check_no_region(what: str, parameters: Mapping[str, Any] | None) -> None:
    """Raises RequestError for a tensor in shared memory: a region is a file of this machine that a client names.

    Source: Triton's page extension_shared_memory; its CVE-2025-23319 and its siblings.
    """
    if parameters and any(name in parameters for name in REGION):
        raise RequestError(f"{what} is in a shared-memory region; {NO_REGIONS}")


def check_no_classes(output: str, parameters: Mapping[str, Any] | None) -> None:
    """Raises RequestError for an output that is requested as classes."""
    if parameters and parameters.get("classification"):
        raise RequestError(
            f"output '{output}' requests classification, which is not supported",
            hint="request the output itself, and sort its values",
        )


def _binary_outputs(
    outputs: list[_Output] | None, parameters: dict[str, Any] | None, names: tuple[str, ...]
) -> frozenset[str]:
    """Names of the outputs sent as raw bytes: as each output says, else as the request says for all."""
    default = bool(parameters and parameters.get("binary_data_output"))
    own = {
        output.name: bool(output.parameters["binary_data"])
        for output in outputs or ()
        if output.parameters and "binary_data" in output.parameters
    }
    return frozenset(name for name in names if own.get(name, default)) if default or own else frozenset()


def _read_input(given: GivenInput, spec: TensorSpec | None, tail: arrays.Tail | None) -> Array:
    _check_datatype(given, spec)
    size = given.parameters.get("binary_data_size") if given.parameters is not None else None
    if size is not None:
        if given.data:
            raise RequestError(f"input '{given.name}' has both data and binary_data_size")
        if tail is None:
            raise RequestError(
                f"input '{given.name}' is binary, and the request has no header Inference-Header-Content-Length"
            )
        return tail.take(given.name, given.datatype, given.shape, size)
    if given.datatype == "FP16":
        raise RequestError(f"input '{given.name}' is FP16, which this protocol sends as raw bytes only")
    if not given.data:
        raise RequestError(f"input '{given.name}' has no data")
    depth = arrays.depth_of(memoryview(given.data))
    if depth == 0 or (depth != 1 and depth != len(given.shape)):
        raise RequestError(
            f"data of input '{given.name}' nests {depth} lists, expected 1 (flat) or {len(given.shape)} (as its shape)"
        )
    array = arrays.parse(given.data, given.datatype, depth, given.name)
    if depth > 1 and array.shape != tuple(given.shape):
        raise RequestError(
            f"data of input '{given.name}' has the shape {list(array.shape)}, its shape says {given.shape}"
        )
    if array.size != math.prod(given.shape):
        raise RequestError(
            f"data of input '{given.name}' has {array.size} values, "
            f"its shape {given.shape} says {arrays.format_size(math.prod(given.shape))}"
        )
    return array.reshape(given.shape)


def _check_datatype(given: GivenInput, spec: TensorSpec | None) -> None:
    if spec is not None and given.datatype != spec.datatype:
        raise RequestError(f"input '{given.name}' has datatype {given.datatype[:32]}, expected {spec.datatype}")
    if given.datatype not in NUMPY_DTYPES:
        raise RequestError(
            f"input '{given.name}' has datatype {given.datatype[:32]}, which no model here accepts "
            f"(known: {join_names(NUMPY_DTYPES)})"
        )


def _check_shape(given: GivenInput) -> None:
    if len(given.shape) > arrays.MAX_DEPTH:
        raise RequestError(
            f"input '{given.name}' has {len(given.shape)} dimensions, at most {arrays.MAX_DEPTH} are allowed"
        )
    for size in given.shape:
        if not 0 <= size < 2**31:
            raise RequestError(f"input '{given.name}' has a dimension of size {arrays.format_size(size)} in its shape")


def _check_outputs(given: list[_Output] | None, signature: Signature) -> tuple[str, ...]:
    """Names of the outputs that a request asks for. Raises RequestError."""
    known = tuple(spec.name for spec in signature.outputs)
    if not given:
        return known
    names = tuple(output.name for output in given)
    check_count(len(names), len(known), "outputs", "gives")
    for output in given:
        check_name(output.name, "an output")
        check_no_region(f"output '{output.name}'", output.parameters)
        if output.name not in known:
            near = closest(output.name, known)
            raise RequestError(
                f"unexpected output '{output.name[:MAX_NAME]}' (the model gives: {join_names(known)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
        check_no_classes(output.name, output.parameters)
    if len(set(names)) != len(names):
        twice = join_names(name for name in known if names.count(name) > 1)
        raise RequestError(f"an output is requested twice: {twice}")
    return names


def timeout_s(parameters: Mapping[str, Any] | None) -> float | None:
    """The deadline in a request's parameters, in seconds from now. Raises RequestError."""
    if not parameters:
        return None
    if parameters.get("sequence_id"):
        raise RequestError("parameter sequence_id is set, but no model here is stateful")
    timeout_us = parameters.get("timeout")
    if timeout_us is None or timeout_us == 0:
        return None
    if not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or timeout_us < 0:
        raise RequestError("parameter timeout must be a positive whole number of microseconds")
    return min(timeout_us, 10**12) / 1e6


def priority(given: object) -> int:
    """The level that a request names, 1 the most urgent. Raises RequestError.

    As in Triton, 0 and levels that do not exist are the default one.

    >>> priority(1), priority(None), priority(0), priority(b"5"), priority(77)
    (1, 3, 3, 5, 3)
    """
    if given is None:
        return USUAL
    if isinstance(given, bytes) and given.isdigit() and len(given) < 20:
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise RequestError(f"priority must be a whole number from 1, the most urgent, to {PRIORITIES}")
    return given if 1 <= given <= PRIORITIES else USUAL


def encode(name: str, version: str, call: InferCall, outputs: Mapping[str, Array]) -> Encoded:
    """The answer's body. Raises RequestError for an output that the protocol's JSON does not support (FP16)."""
    if not call.binary:
        tensors = [_tensor(key, outputs[key]) for key in call.outputs]
        return Encoded(_ENCODER.encode(_Answer(name, version, tensors, call.id)), None)
    if call.json_cache is None:
        return _encode_binary(name, version, call, outputs)
    given = [outputs[key] for key in call.outputs]
    head = call.json_cache.get(kind := tuple([(array.dtype, array.shape) for array in given]))
    if head is None:
        made = _encode_binary(name, version, call, outputs)
        if len(call.json_cache) < MAX_CACHED:
            call.json_cache[kind] = made.body[: made.json_bytes]
        return made
    tail = [arrays.as_bytes(key, array) for key, array in zip(call.outputs, given, strict=True)]
    return Encoded(b"".join([head, *tail]), len(head))


def around(name: str, version: str, call: InferCall, outputs: Mapping[str, Array]) -> list[bytes]:
    """The JSON of an answer without id, split where the values of each output go.

    Raises RequestError as `encode` does.
    """
    tensors = [_Tensor(key, outputs[key].shape, _datatype(key, outputs[key]), []) for key in call.outputs]
    *parts, last = _ENCODER.encode(_Answer(name, version, tensors)).split(_NO_NUMBERS)
    return [*[part + _DATA for part in parts], last]


def with_id(end: bytes) -> tuple[bytes, bytes]:
    """The `end` of an answer without id, or all of its JSON, split where the text of an id goes.

    >>> with_id(b'{"outputs":[]}')
    (b'{"outputs":[],"id":"', b'"}')
    """
    return end[:-1] + b',"id":"', b'"}'


numbers = _ENCODER.encode
"""Encodes those values."""


def _encode_binary(name: str, version: str, call: InferCall, outputs: Mapping[str, Array]) -> Encoded:
    tensors, tail = [], []
    for key in call.outputs:
        array = outputs[key]
        if key not in call.binary:
            tensors.append(_tensor(key, array))
            continue
        raw = arrays.as_bytes(key, array)
        tail.append(raw)
        tensors.append(_Tensor(key, array.shape, DATATYPES[array.dtype], parameters={"binary_data_size": len(raw)}))
    head = _ENCODER.encode(_Answer(name, version, tensors, call.id))
    return Encoded(b"".join([head, *tail]), len(head))


def _tensor(name: str, array: Array) -> _Tensor:
    return _Tensor(name, array.shape, _datatype(name, array), array.ravel().tolist())


def _datatype(name: str, array: Array) -> str:
    datatype = DATATYPES[array.dtype]
    if datatype == "FP16":
        raise RequestError(
            f"output '{name}' is FP16, which this protocol does not send as JSON numbers",
            hint="request it as raw bytes (parameter binary_data), or use /predictions",
        )
    return datatype


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """One input or output in model metadata; -1 is a symbol."""
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}
