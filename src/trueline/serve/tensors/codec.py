"""The Open Inference Protocol: bytes to arrays, arrays to bytes. Pure; tensors as raw bytes are `binary`'s.

Source: the protocol's REST page, version 2, and docs/guides/serve.md for what it leaves open. Everything that a
client can get wrong is a RequestError here, or in `Signature.check`, in words that name the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature, TensorSpec
from trueline.errors import RequestError, closest, join_names
from trueline.serve.batching.policy import PRIORITIES, USUAL
from trueline.serve.tensors import binary, json_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


MAX_NAME = 256
"""No input's name is longer; a longer one is not echoed."""
MAX_TOLD = 64
"""Answers' JSON is kept for so many shapes of one kind of call."""


class GivenInput(msgspec.Struct):
    """What a request says of an input."""

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
_DATA = b'"data":'
_NO_NUMBERS = _DATA + b"[]"


class Call(msgspec.Struct, frozen=True):
    """One request, decoded."""

    inputs: dict[str, Array]
    wanted: tuple[str, ...]
    """Names of the outputs to answer with, in the order asked for."""
    id: str | None
    timeout_s: float | None
    binary: frozenset[str] = frozenset()
    """Names of the outputs that are wanted as raw bytes."""
    priority: object = None
    """As it was given."""
    told: dict[object, bytes] | None = None
    """The JSON of answers in raw bytes by the outputs' datatypes and shapes, where calls of one kind share it."""

    def of(self, inputs: dict[str, Array]) -> Call:
        """The same asked of `inputs`."""
        return Call(inputs, self.wanted, self.id, self.timeout_s, self.binary, self.priority, self.told)


class Encoded(msgspec.Struct, frozen=True):
    """An answer's body. `json_bytes` of it are JSON; None: all."""

    body: bytes
    json_bytes: int | None


def decode(body: bytes | bytearray, signature: Signature, json_bytes: int | None = None) -> Call:
    """The call in an infer request's body, of which the first `json_bytes` are JSON (None: all). Raises RequestError.

    Names and shapes are checked against `signature` where they are needed to read the data; the rest is left to
    `Signature.check`, which runs before the program does.
    """
    return read(body, signature, json_bytes)[0]


def read(
    body: bytes | bytearray, signature: Signature, json_bytes: int | None = None
) -> tuple[Call, Sequence[GivenInput]]:
    """The same with what its JSON says of each input; of a raw request nothing."""
    if json_bytes == 0:
        names = tuple(spec.name for spec in signature.outputs)
        return Call(binary.raw_input(body, signature), names, None, None, frozenset(names)), ()
    tail = None
    if json_bytes is not None:
        tail = binary.Tail(memoryview(body)[json_bytes:])
        body = bytes(memoryview(body)[:json_bytes])
    try:
        request = _REQUEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no infer request: {error}") from error
    except RecursionError as error:
        raise RequestError("the body nests too deeply") from error
    specs = {spec.name: spec for spec in signature.inputs}
    inputs: dict[str, Array] = {}
    for given in request.inputs:
        if len(given.name) > MAX_NAME:
            raise RequestError(f"the name of an input has {len(given.name)} characters, at most {MAX_NAME} go")
        if given.name in inputs:
            raise RequestError(f"input '{given.name}' is given twice")
        inputs[given.name] = _read(given, specs.get(given.name), tail)
    if tail is not None:
        tail.check_empty()
    wanted = _wanted(request.outputs, signature)
    as_bytes = _binary(request.outputs, request.parameters, wanted)
    urgent = request.parameters.get("priority") if request.parameters else None
    call = Call(inputs, wanted, request.id, timeout_s(request.parameters), as_bytes, urgent)
    return call, request.inputs


def _binary(
    outputs: list[_Output] | None, parameters: dict[str, Any] | None, wanted: tuple[str, ...]
) -> frozenset[str]:
    """Which of the outputs are wanted as raw bytes: as each says for itself, else as the request says for all."""
    everything = bool(parameters and parameters.get("binary_data_output"))
    said = {
        output.name: bool(output.parameters["binary_data"])
        for output in outputs or ()
        if output.parameters and "binary_data" in output.parameters
    }
    if not everything and not said:
        return frozenset()
    return frozenset(name for name in wanted if said.get(name, everything))


def _read(given: GivenInput, spec: TensorSpec | None, tail: binary.Tail | None) -> Array:
    _check_datatype(given, spec)
    _check_shape(given)
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
        raise RequestError(f"input '{given.name}' is FP16, which this protocol carries as raw bytes only")
    if not given.data:
        raise RequestError(f"input '{given.name}' has no data")
    depth = json_tensors.depth_of(memoryview(given.data))
    if depth == 0 or (depth != 1 and depth != len(given.shape)):
        raise RequestError(
            f"data of input '{given.name}' nests {depth} lists, expected 1 (flat) or {len(given.shape)} (as its shape)"
        )
    array = json_tensors.parse(given.data, given.datatype, depth, given.name)
    if depth > 1 and array.shape != tuple(given.shape):
        raise RequestError(
            f"data of input '{given.name}' has the shape {list(array.shape)}, its shape says {given.shape}"
        )
    if array.size != math.prod(given.shape):
        raise RequestError(
            f"data of input '{given.name}' has {array.size} values, "
            f"its shape {given.shape} says {_short(math.prod(given.shape))}"
        )
    return array.reshape(given.shape)


def _check_datatype(given: GivenInput, spec: TensorSpec | None) -> None:
    if spec is not None and given.datatype != spec.datatype:
        raise RequestError(f"input '{given.name}' has datatype {given.datatype[:32]}, expected {spec.datatype}")
    if given.datatype not in NUMPY_DTYPES:
        raise RequestError(
            f"input '{given.name}' has datatype {given.datatype[:32]}, which no model here takes "
            f"(known: {join_names(NUMPY_DTYPES)})"
        )


def _check_shape(given: GivenInput) -> None:
    if len(given.shape) > json_tensors.MAX_DEPTH:
        raise RequestError(
            f"input '{given.name}' has {len(given.shape)} dimensions, at most {json_tensors.MAX_DEPTH} go"
        )
    for size in given.shape:
        if not 0 <= size < 2**31:
            raise RequestError(f"input '{given.name}' has a dimension of size {_short(size)} in its shape")


def _short(size: int) -> str:
    return str(size) if abs(size) < 10**20 else ("more than 10^20" if size > 0 else "less than -10^20")


def _wanted(asked: list[_Output] | None, signature: Signature) -> tuple[str, ...]:
    names = tuple(spec.name for spec in signature.outputs)
    if not asked:
        return names
    wanted = tuple(output.name for output in asked)
    for output in asked:
        if output.name not in names:
            near = closest(output.name, names)
            raise RequestError(
                f"unexpected output '{output.name}' (the model gives: {join_names(names)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
        if output.parameters and output.parameters.get("classification"):
            raise RequestError(f"output '{output.name}' is asked for as classification, which is not done here")
    if len(set(wanted)) != len(wanted):
        raise RequestError(f"an output is asked for twice: {join_names(wanted)}")
    return wanted


def timeout_s(parameters: Mapping[str, Any] | None) -> float | None:
    """The deadline in a request's parameters, in seconds from now. Raises RequestError."""
    if not parameters:
        return None
    if parameters.get("sequence_id"):
        raise RequestError("parameter sequence_id is set, but no model here keeps a sequence")
    timeout_us = parameters.get("timeout")
    if timeout_us is None or timeout_us == 0:
        return None
    if not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or timeout_us < 0:
        raise RequestError("parameter timeout is to be a positive whole number of microseconds")
    return min(timeout_us, 10**12) / 1e6


def priority(given: object) -> int:
    """The level that a request asks for, 1 the most urgent. Raises RequestError.

    As Triton has it, 0 and levels that do not exist are the usual one.

    >>> priority(1), priority(None), priority(0), priority(b"5"), priority(77)
    (1, 3, 3, 5, 3)
    """
    if given is None:
        return USUAL
    if isinstance(given, bytes) and given.isdigit() and len(given) < 20:
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise RequestError(f"priority is to be a whole number: 1, the most urgent, to {PRIORITIES}")
    return given if 1 <= given <= PRIORITIES else USUAL


def encode(name: str, version: str, call: Call, outputs: Mapping[str, Array]) -> Encoded:
    """The answer's body. Raises RequestError when an output cannot be said in this protocol's JSON (FP16)."""
    if not call.binary:
        told = [_tensor(key, outputs[key]) for key in call.wanted]
        return Encoded(_ENCODER.encode(_Answer(name, version, told, call.id)), None)
    if call.told is not None:
        return _told_before(name, version, call, call.told, outputs)
    return _in_bytes(name, version, call, outputs)


def around(name: str, version: str, call: Call, outputs: Mapping[str, Array]) -> list[bytes]:
    """The JSON of an answer without an id, cut where the numbers of each output go.

    Raises RequestError as `encode` does.
    """
    told = [_Tensor(key, outputs[key].shape, _datatype(key, outputs[key]), []) for key in call.wanted]
    *cut, last = _ENCODER.encode(_Answer(name, version, told)).split(_NO_NUMBERS)
    return [*[part + _DATA for part in cut], last]


numbers = _ENCODER.encode
"""What goes there, of `tensors.flat`."""


def _told_before(
    name: str, version: str, call: Call, told: dict[object, bytes], outputs: Mapping[str, Array]
) -> Encoded:
    """The same as `_in_bytes`, for a call without an id all of whose outputs are wanted as raw bytes."""
    arrays = [outputs[key] for key in call.wanted]
    head = told.get(kind := tuple([(array.dtype, array.shape) for array in arrays]))
    if head is None:
        made = _in_bytes(name, version, call, outputs)
        if len(told) < MAX_TOLD:
            told[kind] = made.body[: made.json_bytes]
        return made
    tail = [binary.as_bytes(key, array) for key, array in zip(call.wanted, arrays, strict=True)]
    return Encoded(b"".join([head, *tail]), len(head))


def _in_bytes(name: str, version: str, call: Call, outputs: Mapping[str, Array]) -> Encoded:
    told, tail = [], []
    for key in call.wanted:
        array = outputs[key]
        if key not in call.binary:
            told.append(_tensor(key, array))
            continue
        raw = binary.as_bytes(key, array)
        tail.append(raw)
        told.append(_Tensor(key, array.shape, DATATYPES[array.dtype], parameters={"binary_data_size": len(raw)}))
    head = _ENCODER.encode(_Answer(name, version, told, call.id))
    return Encoded(b"".join([head, *tail]), len(head))


def _tensor(name: str, array: Array) -> _Tensor:
    return _Tensor(name, array.shape, _datatype(name, array), json_tensors.flat(array))


def _datatype(name: str, array: Array) -> str:
    datatype = DATATYPES[array.dtype]
    if datatype == "FP16":
        raise RequestError(
            f"output '{name}' is FP16, which this protocol does not carry as JSON numbers",
            hint="ask for it as raw bytes (parameter binary_data), or use /predictions",
        )
    return datatype


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """One input or output as model metadata shows it: -1 stands for a symbol."""
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}
