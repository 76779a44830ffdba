"""KServe's V1 protocol: rows or columns of plain JSON in, predictions out. Pure.

    {"instances": [record, ...]}          {"predictions": [answer of each record, ...]}
    {"inputs": {input name: batch, ...}}  {"predictions": {output name: batch, ...}}, or the batch of the only output

Records are what /predictions takes (see `records`). Source: KServe's V1 page, TensorFlow Serving's REST API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from trueline.bundle.signature import Signature
from trueline.errors import RequestError
from trueline.serve import json_records

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_BODY = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Rows:
    """One request, decoded. `by_row`: it came as instances, and is answered record by record."""

    inputs: dict[str, Array]
    by_row: bool


def decode(body: bytes | bytearray, signature: Signature) -> Rows:
    """The batch in a predict request's body. Raises RequestError."""
    try:
        given = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"Unrecognized request format: {error}") from error
    if "instances" in given:
        found = json_records.decode(msgspec.json.encode({"instances": given["instances"]}), signature)
        return Rows(found.inputs, True)
    if "inputs" not in given:
        raise RequestError("Unrecognized request format: the body names neither 'instances' nor 'inputs'")
    found = json_records.decode(bytes(given["inputs"]), signature)
    if found.single:
        raise RequestError("'inputs' is to hold batches; send one record as an instance")
    return Rows(found.inputs, False)


def encode(outputs: Mapping[str, Array], call: Rows) -> bytes:
    """The answer's body."""
    if len(outputs) == 1:
        return msgspec.json.encode({"predictions": next(iter(outputs.values())).tolist()})
    columns = {name: array.tolist() for name, array in outputs.items()}
    if not call.by_row:
        return msgspec.json.encode({"predictions": columns})
    rows = len(next(iter(call.inputs.values())))
    uncounted = [name for name, array in outputs.items() if array.ndim == 0 or len(array) != rows]
    if uncounted:
        raise RequestError(
            f"output '{uncounted[0]}' is not one answer for each record",
            hint="send the batch as 'inputs', which is answered with whole outputs",
        )
    told = [{name: values[row] for name, values in columns.items()} for row in range(rows)]
    return msgspec.json.encode({"predictions": told})
