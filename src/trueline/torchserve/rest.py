"""TorchServe's paths of the data port, and SageMaker's among them; of those /invocations is MLflow's too.

    /ping
    /predictions/{m}[/{ver}[/more/path]], /explanations/{m}[/{ver}]
    /wfpredict/{workflow}
    /invocations, /models/{m}/invoke, /{m}/predict, /{m}/{ver}/predict     the query becomes parameters

Source: TorchServe 0.12's InferenceRequestHandler, as the contract page has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from trueline.errors import NotFound, RequestError
from trueline.serve import json_records
from trueline.serve.handlers import request as bodies
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.protocols import mlflow
from trueline.serve.protocols.dispatch import PRIORITY_HEADER
from trueline.serve.protocols.errors import allow, check_media
from trueline.serve.protocols.oip import v1
from trueline.torchserve import responses
from trueline.torchserve.workflows.executor import UnknownWorkflow
from trueline.web.messages import JSON, Request, Response, query_of

if TYPE_CHECKING:
    from trueline.serve.handlers.result import Answer as Outcome
    from trueline.serve.models.version import Outputs
    from trueline.serve.protocols.dispatch import Answer, Asking

_PREDICT_METHODS = ("POST", "PUT", "GET")


class TorchServePaths:
    """Answers what TorchServe answers on its inference port."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def answer(self, request: Request, parts: list[str]) -> Answer:
        """The answer for the path of `parts`. Raises RequestError, NotFound for a path that is none of these."""
        match parts:
            case ["predictions", model]:
                return self._predict(request, model, None)
            case ["predictions", model, version, *rest]:
                return self._predict(request, model, version, "/".join(rest))
            case ["explanations", model]:
                return self.explain(request, model, None)
            case ["explanations", model, version]:
                return self.explain(request, model, version)
            case ["invocations"]:
                return self._invoke(request)
            case ["models", model, "invoke"] | [model, "predict"]:
                return self._predict(request, model, None, older=True)
            case [model, version, "predict"]:
                return self._predict(request, model, version, older=True)
            case ["wfpredict", workflow]:
                return self._workflow(request, workflow)
            case ["ping"]:
                allow(request, ("GET", "POST", "HEAD"), responses.NO_METHOD)
                return self._ping()
            case _:
                raise NotFound(responses.NO_RESOURCE)

    def explain(self, request: Request, model: str, version: str | None) -> Answer:
        """Why the model answers so. Raises RequestError, NotFound."""
        allow(request, _PREDICT_METHODS, responses.NO_METHOD)
        found = self._asking.find(request, model, version or None)
        if isinstance(found, HandlerVersion):
            return self._asking.handled(request, found, explain=True)
        raise NotFound("no explainer is served for this model")

    def _ping(self) -> Response:
        return responses.status("Unhealthy", 500) if self._asking.sick else responses.status("Healthy")

    def _workflow(self, request: Request, name: str) -> Answer:
        allow(request, _PREDICT_METHODS, responses.NO_METHOD)
        if self._asking.workflows is None:
            raise UnknownWorkflow(name)
        found = self._asking.workflows.find(name)
        ask = bodies.read(request, explain=False)
        return self._asking.later(request.path, found.predict(ask, strict=self._asking.strict), _of_workflow)

    def _invoke(self, request: Request) -> Answer:
        """SageMaker's route, and MLflow's: the model is named in the query, or the only one."""
        allow(request, _PREDICT_METHODS, responses.NO_METHOD)
        names = self._asking.models.names()
        model = query_of(request.target).get("model_name") or (names[0] if len(names) == 1 else "")
        if not model:
            raise RequestError("Parameter model_name is required.")
        return self._predict(request, model, None, older=True, scored=True)

    def _predict(
        self,
        request: Request,
        model: str,
        version: str | None,
        rest: str = "",
        *,
        older: bool = False,
        scored: bool = False,
    ) -> Answer:
        allow(request, _PREDICT_METHODS, responses.NO_METHOD)
        began = perf_counter()
        found = self._asking.find(request, model, version or None)
        if isinstance(found, HandlerVersion):
            return self._asking.handled(request, found, rest=rest, query=older)
        check_media(request)
        self._asking.check_room(request, found)
        media = request.headers.get(b"content-type", b"")
        rows = mlflow.decode(request.body, media, found.signature) if scored else None
        encode: Callable[[Outputs], Response]
        if rows is not None:
            inputs, encode = rows.inputs, partial(_predictions, rows)
        else:
            given = json_records.decode(request.body, found.signature)
            inputs, encode = given.inputs, partial(_answers, given)
        return self._asking.ask(request, found, inputs, None, encode, began, request.headers.get(PRIORITY_HEADER))


def _answers(given: json_records.Records, outputs: Outputs) -> Response:
    return responses.reply(200, json_records.encode(outputs, single=given.single))


def _predictions(rows: v1.Rows, outputs: Outputs) -> Response:
    return Response(200, v1.encode(outputs, rows))


def _of_workflow(answer: Outcome) -> Response:
    """What the last node answered; TorchServe calls it JSON, whatever it is, and here a handler may say otherwise."""
    made = responses.handled(answer)
    made.content_type = made.content_type or JSON
    return made
