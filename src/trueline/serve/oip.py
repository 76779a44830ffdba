"""The Open Inference Protocol's JSON: bytes to arrays, arrays to bytes. Pure.

Source: the protocol's REST page, version 2, and docs/guides/serve.md for what it leaves open. Everything that a
client can get wrong is a RequestError here, or in `Signature.check`, in words that name the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature, TensorSpec
from trueline.errors import RequestError, closest, listed
from trueline.serve import tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


MAX_NAME = 256
"""No input's name is longer; a longer one is not echoed."""


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


class _Tensor(msgspec.Struct):
    name: str
    shape: tuple[int, ...]
    datatype: str
    data: list[Any]


class _Answer(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_Tensor]
    id: str | None = None


_REQUEST = msgspec.json.Decoder(_Request)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call:
    """One request, decoded."""

    inputs: dict[str, Array]
    wanted: tuple[str, ...]
    """Names of the outputs to answer with, in the order asked for."""
    id: str | None
    timeout_s: float | None


def decode(body: bytes | bytearray, signature: Signature) -> Call:
    """The call in an infer request's body. Raises RequestError.

    Names and shapes are checked against `signature` where they are needed to read the data; the rest is left to
    `Signature.check`, which runs before the program does.
    """
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
        inputs[given.name] = _read(given, specs.get(given.name))
    return Call(inputs, _wanted(request.outputs, signature), request.id, _timeout_s(request.parameters))


def _read(given: _Input, spec: TensorSpec | None) -> Array:
    _check_datatype(given, spec)
    _check_shape(given)
    if not given.data:
        binary = given.parameters is not None and "binary_data_size" in given.parameters
        why = "; binary tensors are not read here, send its values as JSON" if binary else ""
        raise RequestError(f"input '{given.name}' has no data{why}")
    depth = tensors.depth_of(memoryview(given.data))
    if depth == 0 or (depth != 1 and depth != len(given.shape)):
        raise RequestError(
            f"data of input '{given.name}' nests {depth} lists, expected 1 (flat) or {len(given.shape)} (as its shape)"
        )
    array = tensors.parse(given.data, given.datatype, depth, given.name)
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


def _check_datatype(given: _Input, spec: TensorSpec | None) -> None:
    if spec is not None and given.datatype != spec.datatype:
        raise RequestError(f"input '{given.name}' has datatype {given.datatype[:32]}, expected {spec.datatype}")
    if given.datatype not in NUMPY_DTYPES:
        raise RequestError(
            f"input '{given.name}' has datatype {given.datatype[:32]}, which no model here takes "
            f"(known: {listed(NUMPY_DTYPES)})"
        )
    if given.datatype == "FP16":
        raise RequestError(f"input '{given.name}' is FP16, which this protocol does not carry as JSON numbers")


def _check_shape(given: _Input) -> None:
    if len(given.shape) > tensors.MAX_DEPTH:
        raise RequestError(f"input '{given.name}' has {len(given.shape)} dimensions, at most {tensors.MAX_DEPTH} go")
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
                f"unexpected output '{output.name}' (the model gives: {listed(names)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
        if output.parameters and output.parameters.get("classification"):
            raise RequestError(f"output '{output.name}' is asked for as classification, which is not done here")
    if len(set(wanted)) != len(wanted):
        raise RequestError(f"an output is asked for twice: {listed(wanted)}")
    return wanted


def _timeout_s(parameters: dict[str, Any] | None) -> float | None:
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


def encode(name: str, version: str, call: Call, outputs: Mapping[str, Array]) -> bytes:
    """The answer's body. Raises RequestError when an output cannot be said in this protocol's JSON (FP16)."""
    return _ENCODER.encode(_Answer(name, version, [_tensor(key, outputs[key]) for key in call.wanted], call.id))


def _tensor(name: str, array: Array) -> _Tensor:
    datatype = DATATYPES[array.dtype]
    if datatype == "FP16":
        raise RequestError(
            f"output '{name}' is FP16, which this protocol does not carry as JSON numbers",
            hint="ask for other outputs, or use /predictions",
        )
    return _Tensor(name, array.shape, datatype, tensors.flat(array))


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """One input or output as model metadata shows it: -1 stands for a symbol."""
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}
