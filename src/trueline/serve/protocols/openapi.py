"""The server's APIs as OpenAPI 3.0 documents: the data plane and management. Pure.

The data plane's document names the models that are served now, with their inputs and an example that is accepted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.serve.models.servable import Servable

Document = dict[str, Any]
MAX_EXAMPLE = 64
"""Numbers that an example shows of one dimension."""
_JSON_TYPES = {"F": "number", "I": "integer", "U": "integer", "B": "boolean"}
"""By the first letter of a datatype."""
_STRING: Document = {"type": "string"}
_INTEGER: Document = {"type": "integer"}
_ARRAY: Document = {"type": "array"}
_OBJECT: Document = {"type": "object"}
_LISTED: Document = {"type": "array", "items": _OBJECT}


def _object(required: Sequence[str] = (), /, **properties: Document) -> Document:
    return {"type": "object", **({"required": [*required]} if required else {}), "properties": properties}


_OIP_ERROR = _object(["error"], error=_STRING)
_TS_ERROR = _object(["code", "type", "message"], code=_INTEGER, type=_STRING, message=_STRING)
_TS_STATUS = _object(["status"], status=_STRING)


def data_plane(versions: Iterable[Servable], version: str, workflows: Iterable[str] = ()) -> Document:
    """The document of the data port, for the ready versions and the workflows. `version` is Trueline's."""
    index = _operation("Every version with its state", _LISTED, _OIP_ERROR, body=_object(ready={"type": "boolean"}))
    paths: Document = {
        "/v2": _get("Server metadata"),
        "/v2/health/live": _get("Liveness"),
        "/v2/health/ready": _get("Readiness of all models", also=("503",)),
        "/v2/models/stats": _get("Statistics of all models"),
        "/v2/repository/index": {"post": index},
        "/v1/models": _get("Names of the models"),
        "/ping": {"get": _operation("Health, in TorchServe's form", _TS_STATUS, _TS_ERROR, also=("500",))},
    }
    ready = [one for one in versions if one.state == "ready"]
    for one in ready:
        paths |= _model(one)
    bundles = [one for one in ready if one.handler is None]
    if bundles:
        paths["/invocations"] = {"post": _invocation(bundles)}
    for name in workflows:
        predict = _operation(f"Run the workflow {name}", {}, _TS_ERROR, body={}, also=("500", "503"))
        paths[f"/wfpredict/{name}"] = {"post": predict}
    return _document("Trueline", version, paths)


def of_model(version: Servable, trueline: str) -> Document:
    """The paths of one model on the data port. Raises NotReady."""
    version.check_ready()
    return _document(version.model, trueline, _model(version))


def _model(version: Servable) -> Document:
    if version.handler is not None:
        return _handler(version)
    signature, name, golden = version.program.signature, version.model, version.program.loaded.example
    base = f"/v2/models/{name}/versions/{version.version}"
    infer = {
        "post": _operation(
            f"Infer with {name}", _infer_answer(signature), _OIP_ERROR, body=_infer_body(signature, golden)
        )
    }
    by_column = list(version.program.loaded.records)
    given = by_column or (next(iter(golden.values())) if len(golden) == 1 else golden)
    body = _with_example(_LISTED if by_column else _records(signature), given)
    records = {"post": _operation(f"Predict with {name} (TorchServe)", {}, _TS_ERROR, body=body)}
    rows = {**_object(instances=_ARRAY, inputs=_OBJECT), "example": {"instances": by_column or [_instance(signature)]}}
    predictions = {"type": "object", "required": ["predictions"]}
    return {
        base: _get(f"Metadata of {name}"),
        f"{base}/ready": _get(f"Readiness of {name}", also=("503",)),
        f"{base}/stats": _get(f"Statistics of {name}"),
        f"{base}/infer": infer,
        f"/v2/models/{name}/infer": infer,
        f"/v2/models/{name}/config": _get(f"Configuration of {name}"),
        f"/v1/models/{name}": _get(f"Readiness of {name}", also=("503",)),
        f"/v1/models/{name}:predict": {
            "post": _operation(f"Predict with {name} (KServe V1)", predictions, _OIP_ERROR, body=rows)
        },
        f"/predictions/{name}": records,
        f"/predictions/{name}/{version.version}": records,
    }


def _invocation(versions: Sequence[Servable]) -> Document:
    """The path of SageMaker and MLflow; each model also accepts what it accepts at /predictions."""
    model, first = _parameter("model_name", "query"), versions[0].program
    model["schema"]["enum"] = list(dict.fromkeys(one.model for one in versions))
    body = {
        **_object(
            inputs={},
            instances=_ARRAY,
            dataframe_records=_LISTED,
            dataframe_split=_object(["data"], columns={"type": "array", "items": _STRING}, data=_ARRAY),
        ),
        "maxProperties": 1,
        "example": {"instances": [*first.loaded.records] or [_instance(first.signature)]},
    }
    error = {**_TS_ERROR, "properties": {**_TS_ERROR["properties"], "error_code": _STRING}}
    return _operation("Predict with a model (SageMaker, MLflow)", {}, error, body=body, parameters=[model])


def _handler(version: Servable) -> Document:
    """A handler defines its own formats."""
    name = version.model
    predict = {"post": _operation(f"Predict with {name}'s handler", {}, _TS_ERROR, body={}, also=("503", "507"))}
    explain = {"post": _operation(f"Explain with {name}'s handler", {}, _TS_ERROR, body={}, also=("503", "507"))}
    return {
        f"/v2/models/{name}/ready": _get(f"Readiness of {name}", also=("503",)),
        f"/predictions/{name}": predict,
        f"/predictions/{name}/{version.version}": predict,
        f"/explanations/{name}": explain,
    }


def _with_example(schema: Document, example: Any) -> Document:
    """`schema` with an example that the model was proven with, if there is one."""
    return {**schema, "example": example} if example else schema


def _infer_body(signature: Signature, golden: Mapping[str, Any]) -> Document:
    schemas = [_tensor(spec, signature) for spec in signature.inputs]
    inputs = {
        "type": "array",
        "items": schemas[0] if len(schemas) == 1 else {"anyOf": schemas},
        "minItems": len(schemas),
        "maxItems": len(schemas),
    }
    names = {"enum": [spec.name for spec in signature.outputs]}
    outputs = {"type": "array", "items": _object(["name"], name=names)}
    tensors = [
        {"name": spec.name, "shape": np.shape(data), "datatype": spec.datatype, "data": np.ravel(data).tolist()}
        for spec in signature.inputs
        if (data := golden.get(spec.name)) is not None
    ]
    body = _object(["inputs"], id=_STRING, parameters=_OBJECT, inputs=inputs, outputs=outputs)
    return _with_example(body, {"inputs": tensors} if tensors else None)


def _infer_answer(signature: Signature) -> Document:
    outputs = {"type": "array", "minItems": 1, "maxItems": len(signature.outputs)}
    required = ["model_name", "model_version", "outputs"]
    return _object(required, model_name=_STRING, model_version=_STRING, id=_STRING, outputs=outputs)


def _tensor(spec: TensorSpec, signature: Signature) -> Document:
    shape = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "minItems": len(spec.shape),
        "maxItems": len(spec.shape),
        "example": _smallest(spec, signature),
        "description": f"{list(spec.shape)}; names stand for sizes that are free within the proven range",
    }
    data = {"type": "array", "items": {"type": _JSON_TYPES[spec.datatype[0]]}}
    name, datatype = {"enum": [spec.name]}, {"enum": [spec.datatype]}
    described = {"description": spec.needs} if spec.needs else {}
    return {
        **_object(["name", "shape", "datatype", "data"], name=name, datatype=datatype, shape=shape, data=data),
        **described,
    }


def _smallest(spec: TensorSpec, signature: Signature) -> list[int]:
    """The smallest allowed shape, apart from guards between sizes."""
    shape = []
    for size in spec.shape:
        dim = Dim() if isinstance(size, int) else signature.dims.get(size, Dim())
        least = size if isinstance(size, int) else max(1, dim.min)
        shape.append(least + -least % dim.multiple_of)
    return shape


def _instance(signature: Signature) -> Any:
    """A record of ones, in the form of KServe's V1."""
    rows: dict[str, Any] = {}
    for spec in signature.inputs:
        rows[spec.name] = spec.datatype == "BOOL" or 1
        for size in reversed(_smallest(spec, signature)[1:]):
            rows[spec.name] = [rows[spec.name]] * min(size, MAX_EXAMPLE)
    return rows if len(rows) > 1 else next(iter(rows.values()))


def _records(signature: Signature) -> Document:
    """One record or a batch: see `json_records`."""
    forms = {spec.name: {"anyOf": [_nested_arrays(spec, 1), _nested_arrays(spec, 0)]} for spec in signature.inputs}
    return next(iter(forms.values())) if len(forms) == 1 else _object([*forms], **forms)


def _nested_arrays(spec: TensorSpec, skip: int) -> Document:
    schema: Document = {"type": _JSON_TYPES[spec.datatype[0]]}
    for size in reversed(spec.shape[skip:]):
        bounds = {"minItems": size, "maxItems": size} if isinstance(size, int) else {}
        schema = {"type": "array", "items": schema, **bounds}
    return schema


def management(version: str, *, workflows: bool = False) -> Document:
    """The document of the management port; `workflows`: with their paths."""
    model, which = _parameter("model", "path"), _parameter("version", "path")
    text, number = ("url", "model_name", "model_version"), ("initial_workers", "batch_size", "max_batch_delay")
    registering = [_parameter(name, "query") for name in text]
    registering += [_parameter(name, "query", "integer") for name in number]
    scaling = [_parameter(name, "query", "integer") for name in ("min_worker", "max_worker")]
    paging = [_parameter(name, "query", "integer") for name in ("limit", "next_page_token")]

    def act(summary: str, answer: Document, *parameters: Document, also: tuple[str, ...] = ()) -> Document:
        return _operation(summary, answer, _TS_ERROR, parameters=parameters, also=also)

    paths: Document = {
        "/models": {
            "get": act("Models by name", _OBJECT, *paging),
            "post": act("Load a bundle of the store", _TS_STATUS, *registering),
        },
        "/models/{model}": {
            "get": act("How the default version is served", _LISTED, model),
            "put": act("Set the number of parallel runs", _TS_STATUS, model, *scaling, also=("202",)),
            "delete": act("Remove the model", _TS_STATUS, model),
        },
        "/models/{model}/split": {"put": act("Split traffic by weight: ?1=90&2=10", _TS_STATUS, model)},
        "/models/{model}/{version}": {
            "get": act("How a version is served", _LISTED, model, which),
            "put": act("Set the number of parallel runs", _TS_STATUS, model, which, *scaling, also=("202",)),
            "delete": act("Remove a version", _TS_STATUS, model, which),
        },
        "/models/{model}/{version}/set-default": {
            "put": act("Send requests without a version to this one", _TS_STATUS, model, which)
        },
    }
    if workflows:
        workflow = _parameter("workflow", "path")
        given = [_parameter(name, "query") for name in ("url", "workflow_name")]
        given += [_parameter(name, "query", "integer") for name in ("response_timeout", "startup_timeout")]
        paths["/workflows"] = {
            "get": act("Workflows by name", _OBJECT, *paging),
            "post": act("Register a workflow of the store", _TS_STATUS, *given, also=("500",)),
        }
        paths["/workflows/{workflow}"] = {
            "get": act("How a workflow is served", _LISTED, workflow, also=("503",)),
            "delete": act("Remove a workflow with its nodes", _TS_STATUS, workflow),
        }
    return _document("Trueline management", version, paths)


def _parameter(name: str, where: str, kind: str = "string") -> Document:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}


def _get(summary: str, *, also: tuple[str, ...] = ()) -> Document:
    return {"get": _operation(summary, _OBJECT, _OIP_ERROR, also=also)}


def _operation(
    summary: str,
    answer: Document,
    error: Document,
    *,
    body: Document | None = None,
    parameters: Sequence[Document] = (),
    also: tuple[str, ...] = (),
) -> Document:
    def content(description: str, schema: Document) -> Document:
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    responses = {
        "200": content("The answer", answer),
        **{status: {"description": "See the summary"} for status in also},
        "4XX": content("A client error, with its reason", error),
    }
    made: Document = {"summary": summary, "responses": responses}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if parameters:
        made["parameters"] = [*parameters]
    return made


def _document(title: str, version: str, paths: Document) -> Document:
    return {"openapi": "3.0.3", "info": {"title": title, "version": version}, "paths": paths}
