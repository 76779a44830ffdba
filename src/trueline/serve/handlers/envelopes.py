"""Request envelopes, unwrapped before the handler and wrapped around its answers. Runs in the handler's process.

    body        each request's body, without its name
    json        {"instances": [...]} of every request, joined; {"predictions": [...]} for each
    kserve      the same, and {"explanations": [...]} for explanations
    kservev2    {"inputs": [tensor, ...]} of every request, joined; {"id", "model_name", "model_version", "outputs":
                [tensor, ...]} for each

TorchServe's `kserve` and `kservev2` answer only the first request of a batch; here all are answered.
Source: ts/torch_handler/request_envelope of TorchServe.
"""

import base64
import binascii
import importlib
import json
from collections.abc import Callable
from typing import Any

NAMES = ("body", "json", "kserve", "kservev2")

Entry = Callable[[Any, Any], Any]
_KINDS = {"b": "BOOL", "u": "UINT", "i": "INT", "f": "FP"}
"""By kind of a numpy dtype; the protocol appends the bits."""


def within(name: str, answer: Entry) -> Entry:
    """`answer` behind the envelope `name`, one of NAMES."""
    wrapped = {"json": _instances, "kserve": _instances, "kservev2": _tensors}.get(name)

    def handle(data: Any, context: Any) -> Any:
        if wrapped is None or not data:
            return answer([_body(row) for row in data] if data else data, context)
        return wrapped(answer, data, context)

    return handle


def _instances(answer: Entry, data: list[dict[str, Any]], context: Any) -> Any:
    parts = [_get_list(_object(row), "instances") for row in data]
    found = answer([_decode_base64(one) for part in parts for one in part], context)
    count = sum(map(len, parts))
    if not isinstance(found, list) or len(found) != count:
        raise _prediction_error(f"the handler has to return a list of {count} answers, one for each instance", 503)
    key = "explanations" if context.get_request_header(0, "explain") == "True" else "predictions"
    answers, at = [], 0
    for part in parts:
        answers.append({key: found[at : at + len(part)]})
        at += len(part)
    return answers


def _tensors(answer: Entry, data: list[dict[str, Any]], context: Any) -> Any:
    """The handler gets the inputs of all requests in one list and returns an answer for each input, or for each
    request; the outputs have the names of the inputs.
    """
    bodies = [_object(row) for row in data]
    parts = [[_reshape(one) for one in _get_list(body, "inputs")] for body in bodies]
    found = answer([one for part in parts for one in part], context)
    count = sum(map(len, parts))
    if not isinstance(found, list) or len(found) not in (count, len(data)):
        raise _prediction_error(f"the handler has to return a list of {count} answers, one for each input", 503)
    model, answers, at = context.manifest["model"], [], 0
    for index, (body, part) in enumerate(zip(bodies, parts, strict=True)):
        values = found[at : at + len(part)] if len(found) == count else [found[index]]
        at += len(part)
        answers.append(
            {
                "id": str(body.get("id") or "").strip() or context.get_request_id(index),
                "model_name": model["modelName"],
                "model_version": str(model.get("modelVersion") or "1.0"),
                "outputs": [_tensor(one["name"], value) for one, value in zip(part, values, strict=False)],
            }
        )
    return answers


def _reshape(tensor: Any) -> dict[str, Any]:
    """An input with its data nested as its shape says; of texts the first, as in TorchServe."""
    import numpy as np

    if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
        raise _prediction_error("each of 'inputs' has to be an object with a name, shape, datatype and data", 400)
    values, shape = tensor.get("data"), tensor.get("shape")
    if not isinstance(values, list) or not isinstance(shape, list):
        raise _prediction_error(f"'data' and 'shape' of input '{tensor['name'][:64]}' have to be lists", 400)
    if tensor.get("datatype") == "BYTES":
        return tensor | {"data": values[0] if values else ""}
    try:
        return tensor | {"data": np.array(values).reshape(shape).tolist()}
    except (TypeError, ValueError) as error:
        raise _prediction_error(f"'data' of input '{tensor['name'][:64]}' is not of shape {shape}", 400) from error


def _tensor(name: str, values: Any) -> dict[str, Any]:
    import numpy as np

    array = np.atleast_1d(np.asarray(values))
    kind = array.dtype.kind
    datatype = "BYTES"
    if kind in _KINDS:
        datatype = "BOOL" if kind == "b" else f"{_KINDS[kind]}{8 * array.dtype.itemsize}"
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.reshape(-1).tolist()}


def _body(row: dict[str, Any]) -> Any:
    return row["data"] if row.get("data") is not None else row.get("body")


def _object(row: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of a request, whatever its content type."""
    body = _body(row)
    if isinstance(body, str | bytes | bytearray):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _prediction_error("the body has to be a JSON object", 400) from error
    if not isinstance(body, dict):
        raise _prediction_error("the body has to be a JSON object", 400)
    return body


def _get_list(body: dict[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    if not isinstance(found, list) or not found:
        raise _prediction_error(f"'{key}' of the body has to be a list that is not empty", 400)
    return found


def _decode_base64(value: Any) -> Any:
    """The bytes of {"b64": text}, also for values of an object."""
    if not isinstance(value, dict):
        return value
    if list(value) == ["b64"]:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise _prediction_error("'b64' has to be base64", 400) from error
    packed = {name: one for name, one in value.items() if isinstance(one, dict) and list(one) == ["b64"]}
    return value | {name: _decode_base64(one) for name, one in packed.items()}


def _prediction_error(message: str, code: int) -> Exception:
    made: Exception = importlib.import_module("ts.utils.util").PredictionException(message, code)
    return made
