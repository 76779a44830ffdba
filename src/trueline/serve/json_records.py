"""The body of /predictions for a bundle without a handler: records or batches as plain JSON. Pure.

    body                                  is                                         the answer
    a list as deep as the input's rank    a batch, for a model of one input          the batch's outputs
    a list one less deep                  one record, for a model of one input       that record's output
    {"instances": [record, ...]}          a batch of records (objects by name, when  the batch's outputs
                                          there are several inputs)
    {input name: values, ...}             a batch or one record, for any model       as above

A model of one output answers with its values, a model of several with an object of values by name. NaN and the
infinities are `null` in answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline.bundle.signature import Signature, TensorSpec
from trueline.errors import RequestError, join_names
from trueline.serve.tensors import arrays
from trueline.web.body import Body

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

INSTANCES = "instances"
_EXPLAINED = 1000
"""Records that are read one by one to say what is wrong with them."""
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, slots=True)
class JsonRecords:
    """One request, decoded. `single`: it was one record, and one answer is due."""

    inputs: dict[str, Array]
    single: bool


def decode(body: Body, signature: Signature) -> JsonRecords:
    """The records in a body. Raises RequestError."""
    if not body:
        raise RequestError("the body is empty", hint=_forms(signature))
    if bytes(body[:64]).lstrip()[:1] == b"{":
        return _object(body, signature)
    return _values({_only(signature).name: msgspec.Raw(body)}, signature)


def _object(body: Body, signature: Signature) -> JsonRecords:
    given = _decode(_OBJECT, body)
    names = {spec.name for spec in signature.inputs}
    if INSTANCES in given and INSTANCES not in names:
        if len(given) > 1:
            raise RequestError("beside 'instances' the body holds more; nothing else is read")
        return _instances(given[INSTANCES], signature)
    return _values(given, signature)


def _decode(decoder: msgspec.json.Decoder[Any], text: msgspec.Raw | Body) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON of records: {error}") from error
    except RecursionError as error:
        raise RequestError("the body nests too deeply") from error


def _values(given: Mapping[str, msgspec.Raw], signature: Signature) -> JsonRecords:
    specs = {spec.name: spec for spec in signature.inputs}
    if given.keys() != specs.keys():
        found = join_names(sorted(name[:64] for name in given)[:8])
        raise RequestError(f"the body names: {found}; the model takes: {join_names(sorted(specs))}")
    arrays, single = {}, set()
    for name, text in given.items():
        arrays[name] = _read(text, specs[name])
        single.add(arrays[name].ndim < len(specs[name].shape))
    if len(single) > 1:
        raise RequestError("some inputs are one record, others a batch; send all as one or all as the other")
    one = single == {True}
    return JsonRecords({name: array[np.newaxis] if one else array for name, array in arrays.items()}, one)


def _read(text: msgspec.Raw, spec: TensorSpec) -> Array:
    depth, rank = arrays.depth_of(memoryview(text)), len(spec.shape)
    if depth not in (rank, rank - 1):
        record = f"{rank - 1} for one record or " if rank else ""
        raise RequestError(f"input '{spec.name}' nests {depth} lists, expected {record}{rank} for a batch")
    return arrays.parse(text, spec.datatype, depth, spec.name)


def _instances(text: msgspec.Raw, signature: Signature) -> JsonRecords:
    if len(signature.inputs) == 1 and arrays.depth_of(memoryview(text)) == len(signature.inputs[0].shape):
        only = signature.inputs[0]
        return JsonRecords({only.name: arrays.parse(text, only.datatype, len(only.shape), only.name)}, False)
    rows = _decode(_OBJECTS, text)
    if not rows:
        raise RequestError("'instances' is empty")
    if not _values(rows[0], signature).single:
        raise RequestError("each of 'instances' is to be one record")
    names = rows[0].keys()
    other = next((row for row in rows if row.keys() != names), None)
    if other is not None:
        _values(other, signature)
    return JsonRecords({spec.name: _join(spec, [row[spec.name] for row in rows]) for spec in signature.inputs}, False)


def _join(spec: TensorSpec, texts: list[msgspec.Raw]) -> Array:
    """One array of the texts of all records: reading them one by one takes a thousand times as long."""
    whole = msgspec.Raw(b"[" + b",".join([memoryview(text) for text in texts]) + b"]")
    try:
        return arrays.parse(whole, spec.datatype, len(spec.shape), spec.name)
    except RequestError as error:
        for text in texts[:_EXPLAINED]:
            if _read(text, spec).ndim == len(spec.shape):
                raise RequestError("each of 'instances' is to be one record") from error
        raise RequestError(f"'instances' differ in the shape of input '{spec.name}'") from error


def _only(signature: Signature) -> TensorSpec:
    if len(signature.inputs) != 1:
        names = join_names(spec.name for spec in signature.inputs)
        raise RequestError(f"the model takes several inputs ({names}): send an object of values by name")
    return signature.inputs[0]


def _forms(signature: Signature) -> str:
    spec = signature.inputs[0]
    return f"send JSON: one record or a batch for input '{spec.name}' of shape {list(spec.shape)}"


def encode(outputs: Mapping[str, Array], *, single: bool) -> bytes:
    """The answer's body: values, or an object of values by name when there are several outputs."""
    values = {name: _value(array, single=single) for name, array in outputs.items()}
    if len(values) == 1:
        return msgspec.json.encode(next(iter(values.values())))
    return msgspec.json.encode(values)


def _value(array: Array, *, single: bool) -> Any:
    return (array[0] if single and array.ndim and len(array) == 1 else array).tolist()
