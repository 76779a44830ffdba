"""What the server answers, as OpenAPI 3.0 documents: one of the data plane, one of management. Pure.

The data plane's document names the models that are served now, with their inputs, so that a client's tools can make a
request that is taken. Every face's errors are in it: a client's fault is a 4xx of that form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.serve.models.servable import Servable

Document = dict[str, Any]
MANY = 64
"""Of the numbers of a dimension, so many are shown in an example."""
_JSON_TYPES = {"F": "number", "I": "integer", "U": "integer", "B": "boolean"}
"""By the first letter of a datatype."""
_OIP_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_TS_ERROR: Document = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {"code": {"type": "integer"}, "type": {"type": "string"}, "message": {"type": "string"}},
}
_TS_STATUS = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


def data_plane(versions: Iterable[Servable], version: str, workflows: Iterable[str] = ()) -> Document:
    """The document of the data port, for the versions that are ready, and the workflows. `version` is Trueline's."""
    paths: Document = {
        "/v2": _get("Server metadata", {"type": "object"}),
        "/v2/health/live": _get("Whether the server lives", {"type": "object"}),
        "/v2/health/ready": _get("Whether every model is ready", {"type": "object"}, also=("503",)),
        "/v2/models/stats": _get("Statistics of all models", {"type": "object"}),
        "/v2/repository/index": {
            "post": _operation(
                "Every version with its state",
                {"type": "array", "items": {"type": "object"}},
                _OIP_ERROR,
                body={"type": "object", "properties": {"ready": {"type": "boolean"}}},
            )
        },
        "/v1/models": _get("Names of the models", {"type": "object"}),
        "/ping": {"get": _operation("Health, as TorchServe says it", _TS_STATUS, _TS_ERROR, also=("500",))},
    }
    ready = [one for one in versions if one.state == "ready"]
    for one in ready:
        paths |= _model(one)
    bundles = [one for one in ready if one.handler is None]
    if bundles:
        paths["/invocations"] = {"post": _invocation(bundles)}
    for name in workflows:
        asked = _operation(f"Asks the workflow {name}", {}, _TS_ERROR, body={}, also=("500", "503"))
        paths[f"/wfpredict/{name}"] = {"post": asked}
    return _document("Trueline", version, paths)


def of_model(version: Servable, trueline: str) -> Document:
    """What one model is asked on the data port. Raises NotReady."""
    version.check_ready()
    return _document(version.model, trueline, _model(version))


def _model(version: Servable) -> Document:
    if version.handler is not None:
        return _handler(version)
    signature, name = version.program.signature, version.model
    base = f"/v2/models/{name}/versions/{version.version}"
    infer = {"post": _operation(f"Asks {name}", _infer_answer(signature), _OIP_ERROR, body=_infer_request(signature))}
    predict = _operation(f"Asks {name}, as TorchServe does", {}, _TS_ERROR, body=_records(signature))
    return {
        base: _get(f"Metadata of {name}", {"type": "object"}),
        f"{base}/ready": _get(f"Whether {name} is ready", {"type": "object"}, also=("503",)),
        f"{base}/stats": _get(f"Statistics of {name}", {"type": "object"}),
        f"{base}/infer": infer,
        f"/v2/models/{name}/infer": infer,
        f"/v2/models/{name}/config": _get(f"Configuration of {name}", {"type": "object"}),
        f"/v1/models/{name}": _get(f"Whether {name} is ready", {"type": "object"}, also=("503",)),
        f"/v1/models/{name}:predict": {
            "post": _operation(
                f"Asks {name}, as KServe's V1 does",
                {"type": "object", "required": ["predictions"]},
                _OIP_ERROR,
                body={
                    "type": "object",
                    "properties": {"instances": {"type": "array"}, "inputs": {"type": "object"}},
                    "example": {"instances": [_instance(signature)]},
                },
            )
        },
        f"/predictions/{name}": {"post": predict},
        f"/predictions/{name}/{version.version}": {"post": predict},
    }


def _invocation(versions: Sequence[Servable]) -> Document:
    """What SageMaker and MLflow ask; each model takes what it takes at /predictions, too."""
    named = _parameter("model_name", "query")
    named["schema"]["enum"] = list(dict.fromkeys(one.model for one in versions))
    rows = {"columns": {"type": "array", "items": {"type": "string"}}, "data": {"type": "array"}}
    forms = {
        "inputs": {},
        "instances": {"type": "array"},
        "dataframe_records": {"type": "array", "items": {"type": "object"}},
        "dataframe_split": {"type": "object", "required": ["data"], "properties": rows},
    }
    example = {"instances": [_instance(versions[0].program.signature)]}
    body = {"type": "object", "properties": forms, "maxProperties": 1, "example": example}
    summary = "Asks a model, as SageMaker and MLflow do"
    error = {**_TS_ERROR, "properties": {**_TS_ERROR["properties"], "error_code": {"type": "string"}}}
    return _operation(summary, {}, error, body=body, parameters=[named])


def _handler(version: Servable) -> Document:
    """A handler takes and gives what it likes."""
    name = version.model
    predict = {"post": _operation(f"Asks the handler of {name}", {}, _TS_ERROR, body={}, also=("503", "507"))}
    explain = {"post": _operation(f"Asks the handler of {name} why", {}, _TS_ERROR, body={}, also=("503", "507"))}
    return {
        f"/v2/models/{name}/ready": _get(f"Whether {name} is ready", {"type": "object"}, also=("503",)),
        f"/predictions/{name}": predict,
        f"/predictions/{name}/{version.version}": predict,
        f"/explanations/{name}": explain,
    }


def _infer_request(signature: Signature) -> Document:
    tensors = [_tensor(spec, signature) for spec in signature.inputs]
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {
                "type": "array",
                "items": tensors[0] if len(tensors) == 1 else {"anyOf": tensors},
                "minItems": len(tensors),
                "maxItems": len(tensors),
            },
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"enum": [spec.name for spec in signature.outputs]}},
                },
            },
        },
    }


def _sizes(spec: TensorSpec, signature: Signature) -> list[int]:
    """The smallest shape that is let in, but for what binds sizes to each other."""
    found = []
    for size in spec.shape:
        dim = Dim() if isinstance(size, int) else signature.dims.get(size, Dim())
        least = size if isinstance(size, int) else max(1, dim.min)
        found.append(least + -least % dim.multiple_of)
    return found


def _ones(spec: TensorSpec, sizes: Sequence[int]) -> Any:
    found: Any = spec.datatype == "BOOL" or 1
    for size in reversed(sizes):
        found = [found] * min(size, MANY)
    return found


def _tensor(spec: TensorSpec, signature: Signature) -> Document:
    return {
        "type": "object",
        **({"description": spec.needs} if spec.needs else {}),
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"enum": [spec.name]},
            "datatype": {"enum": [spec.datatype]},
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "minItems": len(spec.shape),
                "maxItems": len(spec.shape),
                "example": _sizes(spec, signature),
                "description": f"{list(spec.shape)}; names stand for sizes that are free within the proven range",
            },
            "data": {"type": "array", "items": {"type": _JSON_TYPES[spec.datatype[0]]}},
        },
    }


def _infer_answer(signature: Signature) -> Document:
    return {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "minItems": 1, "maxItems": len(signature.outputs)},
        },
    }


def _records(signature: Signature) -> Document:
    """One record or a batch: see `records`."""
    if len(signature.inputs) == 1:
        return {"anyOf": [_nested(signature.inputs[0], 1), _nested(signature.inputs[0], 0)]}
    return {
        "type": "object",
        "required": [spec.name for spec in signature.inputs],
        "properties": {spec.name: {"anyOf": [_nested(spec, 1), _nested(spec, 0)]} for spec in signature.inputs},
    }


def _instance(signature: Signature) -> Any:
    """A record of ones, as KServe's V1 has it."""
    rows = {spec.name: _ones(spec, _sizes(spec, signature)[1:]) for spec in signature.inputs}
    return rows if len(rows) > 1 else next(iter(rows.values()))


def _nested(spec: TensorSpec, skip: int) -> Document:
    found: Document = {"type": _JSON_TYPES[spec.datatype[0]]}
    for size in reversed(spec.shape[skip:]):
        found = {"type": "array", "items": found}
        if isinstance(size, int):
            found |= {"minItems": size, "maxItems": size}
    return found


def management(version: str, *, workflows: bool = False) -> Document:
    """The document of the management port; `workflows`: with what is done with those."""
    model, which = _parameter("model", "path"), _parameter("version", "path")
    registering = [
        _parameter(name, "query", kind)
        for name, kind in (
            ("url", "string"),
            ("model_name", "string"),
            ("model_version", "string"),
            ("initial_workers", "integer"),
            ("batch_size", "integer"),
            ("max_batch_delay", "integer"),
        )
    ]
    scaling = [_parameter(name, "query", "integer") for name in ("min_worker", "max_worker")]
    paging = [_parameter("limit", "query", "integer"), _parameter("next_page_token", "query", "integer")]
    listed: Document = {"type": "array", "items": {"type": "object"}}

    def act(summary: str, answer: Document, *parameters: Document, also: tuple[str, ...] = ()) -> Document:
        return _operation(summary, answer, _TS_ERROR, parameters=parameters, also=also)

    paths: Document = {
        "/models": {
            "get": act("Models by name", {"type": "object"}, *paging),
            "post": act("Loads a bundle of the store", _TS_STATUS, *registering),
        },
        "/models/{model}": {
            "get": act("How the default version is served", listed, model),
            "put": act("Runs that go on at the same time", _TS_STATUS, model, *scaling, also=("202",)),
            "delete": act("Takes the model away", _TS_STATUS, model),
        },
        "/models/{model}/split": {"put": act("Traffic by weight: ?1=90&2=10", _TS_STATUS, model)},
        "/models/{model}/{version}": {
            "get": act("How a version is served", listed, model, which),
            "put": act("Runs that go on at the same time", _TS_STATUS, model, which, *scaling, also=("202",)),
            "delete": act("Takes a version away", _TS_STATUS, model, which),
        },
        "/models/{model}/{version}/set-default": {
            "put": act("Requests without a version go to it", _TS_STATUS, model, which)
        },
    }
    if workflows:
        workflow, asked = (
            _parameter("workflow", "path"),
            [_parameter(name, "query") for name in ("url", "workflow_name")],
        )
        asked += [_parameter(name, "query", "integer") for name in ("response_timeout", "startup_timeout")]
        paths |= {
            "/workflows": {
                "get": act("Workflows by name", {"type": "object"}, *paging),
                "post": act("Registers a workflow of the store", _TS_STATUS, *asked, also=("500",)),
            },
            "/workflows/{workflow}": {
                "get": act("How a workflow is served", listed, workflow, also=("503",)),
                "delete": act("Takes a workflow away with its nodes", _TS_STATUS, workflow),
            },
        }
    return _document("Trueline management", version, paths)


def _parameter(name: str, where: str, kind: str = "string") -> Document:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}


def _get(summary: str, answer: Document, *, also: tuple[str, ...] = ()) -> Document:
    return {"get": _operation(summary, answer, _OIP_ERROR, also=also)}


def _operation(
    summary: str,
    answer: Document,
    error: Mapping[str, Any],
    *,
    body: Document | None = None,
    parameters: Iterable[Document] = (),
    also: tuple[str, ...] = (),
) -> Document:
    found: Document = {
        "summary": summary,
        "responses": {
            "200": _content("The answer", answer),
            **{status: {"description": "See the summary"} for status in also},
            "4XX": _content("The client's fault, in words", dict(error)),
        },
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    given = list(parameters)
    if given:
        found["parameters"] = given
    return found


def _content(description: str, schema: Document) -> Document:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _document(title: str, version: str, paths: Document) -> Document:
    return {"openapi": "3.0.3", "info": {"title": title, "version": version}, "paths": paths}
