"""The route table of TorchServe's inference API and of SageMaker's; /invocations is also MLflow's.

    /ping
    /predictions/{m}[/{ver}[/more/path]], /explanations/{m}[/{ver}[/more/path]]
    /wfpredict/{workflow}
    /invocations, /models/{m}/invoke, /{m}/predict, /{m}/{ver}/predict     the query becomes parameters

Source: TorchServe 0.12's InferenceRequestHandler, as the contract page has it.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from trueline.errors import RequestError
from trueline.serve import json_records
from trueline.serve.handlers import messages
from trueline.serve.handlers.messages import encode_answer, reply
from trueline.serve.protocols import openapi, predict
from trueline.serve.protocols.dispatch import NO_METHOD, PREDICT_METHODS, allow, check_media, json
from trueline.serve.tensors.bounds import decode_within
from trueline.serve.tensors.codec import PRIORITY_HEADER
from trueline.torchserve import responses
from trueline.torchserve.workflows.executor import UnknownWorkflow
from trueline.version import __version__
from trueline.web.messages import JSON, Request, Response, query_of

if TYPE_CHECKING:
    from trueline.serve.models.servable import HandlerAnswer, Outputs
    from trueline.serve.protocols.dispatch import Answer, Dispatch, RouteHandler
    from trueline.torchserve.workflows.registry import Workflows


class TorchServeRoutes:
    """The route table of TorchServe's inference port."""

    def __init__(self, dispatch: Dispatch, workflows: Workflows | None = None, *, strict: bool = False) -> None:
        self._dispatch, self._workflows, self._strict = dispatch, workflows, strict

    def match(self, parts: list[str]) -> RouteHandler | None:
        """The handler for the path of `parts`."""
        match parts:
            case ["predictions", model, *rest]:
                version, more = next(iter(rest), None), "/".join(rest[1:])
                return lambda request: self._predict_or_describe(request, model, version, more)
            case ["explanations", model, *rest]:
                version = next(iter(rest), None)
                return lambda request: self._explain_or_describe(request, model, version)
            case ["invocations"]:
                return self._invoke
            case ["models", model, "invoke"] | [model, "predict"]:
                return lambda request: self._predict(request, model, None, older=True)
            case [model, version, "predict"]:
                return lambda request: self._predict(request, model, version, older=True)
            case ["wfpredict", workflow]:
                return lambda request: self._workflow(request, workflow)
            case ["ping"]:
                return self._ping
            case _:
                return None

    def _predict_or_describe(self, request: Request, model: str, version: str | None, more: str) -> Answer:
        if request.method == "OPTIONS":
            return json(200, openapi.of_model(self._dispatch.models.find(model, version), __version__))
        return self._predict(request, model, version, more)

    def _explain_or_describe(self, request: Request, model: str, version: str | None) -> Answer:
        if request.method == "OPTIONS":
            return json(200, openapi.of_model(self._dispatch.models.find(model, version), __version__))
        return self._dispatch.explain(request, model, version)

    def _ping(self, request: Request) -> Response:
        allow(request, ("GET", "POST", "HEAD"), NO_METHOD)
        return responses.health(self._dispatch, strict=self._strict)

    def _workflow(self, request: Request, name: str) -> Answer:
        allow(request, PREDICT_METHODS, NO_METHOD)
        if self._workflows is None:
            raise UnknownWorkflow(name)
        found = self._workflows.find(name)

        def predict(form: messages.Parts | None) -> Answer:
            decoded = messages.decode_request(request, form, explain=False)
            return self._dispatch.respond(request.path, found.predict(decoded, strict=self._strict), _encode_workflow)

        return self._dispatch.decode_form(request, predict)

    def _invoke(self, request: Request) -> Answer:
        """SageMaker's route, and MLflow's: the query names the model, unless there is only one."""
        allow(request, PREDICT_METHODS, NO_METHOD)
        names = self._dispatch.models.names()
        model = query_of(request.target).get("model_name") or (names[0] if len(names) == 1 else "")
        if not model:
            raise RequestError("Parameter model_name is required.")
        return self._predict(request, model, None, older=True, scored=True)

    def _predict(
        self, request: Request, model: str, version: str | None, rest: str = "", *, older: bool = False,
        scored: bool = False,
    ) -> Answer:  # fmt: skip
        allow(request, PREDICT_METHODS, NO_METHOD)
        began = perf_counter()
        found = self._dispatch.find(request, model, version or None)
        if found.handler is not None:
            return self._dispatch.handle(request, found, found.handler, rest=rest, query=older)
        check_media(request)
        self._dispatch.check_room(request, found)
        media = request.headers.get(b"content-type", b"") if scored else None
        if found.program.columns is not None:
            return self._dispatch.answer_records(request, found, began, media=media, wraps=scored)

        def ask(decoded: json_records.JsonRecords | predict.PredictBatch) -> Answer:
            encode = partial(self._encode, request.path, decoded)
            priority = request.headers.get(PRIORITY_HEADER)
            return self._dispatch.ask(request, found, decoded.inputs, None, encode, began, priority)

        args = (found.program.bounds, predict.decode_records, found.program.signature, media)
        return self._dispatch.decode(request, ask, decode_within, *args)

    def _encode(self, path: str, decoded: json_records.JsonRecords | predict.PredictBatch, outputs: Outputs) -> Answer:
        if isinstance(decoded, predict.PredictBatch):
            return self._dispatch.encode(path, outputs, partial(Response, 200), predict.encode, outputs, decoded)
        work = partial(json_records.encode, single=decoded.single)
        return self._dispatch.encode(path, outputs, partial(reply, 200), work, outputs)


def _encode_workflow(answer: HandlerAnswer) -> Response:
    """Labeled as JSON, as in TorchServe, unless the handler set a content type."""
    response = encode_answer(answer)
    response.content_type = response.content_type or JSON
    return response
