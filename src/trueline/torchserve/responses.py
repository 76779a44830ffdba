"""TorchServe's response bodies, headers, exception names and model descriptions.

Source: TorchServe 0.12's HttpRequestHandler and NettyUtils, as the contract page has them. docs/guides/serve.md lists
the differences: overload is 429 with Retry-After, and a client's fault is never a 5xx.
"""

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trueline import events
from trueline.errors import Overloaded, RequestError
from trueline.serve.handlers.failures import DIED, HandlerFailed, Hung
from trueline.serve.handlers.messages import reply
from trueline.serve.models.catalog import UnknownModel, UnknownVersion
from trueline.serve.models.downloads import AlreadyStored
from trueline.serve.models.servable import Servable
from trueline.serve.protocols.dispatch import Dispatch, extra
from trueline.storage.object_store import redact_uri
from trueline.torchserve.parameters import parse_int
from trueline.web.auth import Forbidden, Unauthorized
from trueline.web.messages import Response

_TYPES = {
    401: "InvalidKeyException", 403: "InvalidModelVersionException", 404: "ResourceNotFoundException",
    405: "MethodNotAllowedException", 408: "RequestTimeoutException", 409: "ConflictStatusException",
    429: "ServiceUnavailableException", 500: "InternalServerException", 503: "ServiceUnavailableException",
    504: "RequestTimeoutException", 507: "InternalServerException",
}  # fmt: skip
_SCORING = {404: "RESOURCE_DOES_NOT_EXIST", 429: "REQUEST_LIMIT_EXCEEDED", 503: "TEMPORARILY_UNAVAILABLE",
            504: "TEMPORARILY_UNAVAILABLE"}  # fmt: skip
PAGE = 100
NO_KEY = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


def pretty(value: dict[str, Any] | list[Any]) -> bytes:
    """JSON, indented by two spaces, with a line feed at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def page(names: Sequence[str], query: Mapping[str, str]) -> tuple[dict[str, Any], Sequence[str]]:
    """The names on the page that `limit` and `next_page_token` select, after the head of the response body.

    >>> page(["a", "b", "c"], {"limit": "2"})
    ({'nextPageToken': '2'}, ['a', 'b'])
    """
    limit = parse_int(query.get("limit"), PAGE)
    limit = limit if 0 < limit <= PAGE else PAGE
    start = max(0, parse_int(query.get("next_page_token"), 0))
    head: dict[str, Any] = {"nextPageToken": str(start + limit)} if start + limit < len(names) else {}
    return head, names[start : start + limit]


def status(word: str, code: int = 200) -> Response:
    return reply(code, pretty({"status": word}))


def is_healthy(dispatch: Dispatch, *, strict: bool) -> bool:
    """Whether requests would be answered now. With `strict` as in TorchServe: a model that is scaled to zero workers is
    healthy, and so is one whose workers died until they are given up.
    """
    return not dispatch.sick and (strict or dispatch.ready)


def health(dispatch: Dispatch, *, strict: bool) -> Response:
    healthy = is_healthy(dispatch, strict=strict)
    return status("Healthy") if healthy else status("Unhealthy", 500)


def refusal(code: int, message: str, *, kind: str | None = None, extra: bytes = b"", scoring: bool = False) -> Response:
    """TorchServe's error body; `scoring`: with MLflow's error code, whose clients use the same path."""
    body = {"code": code, "type": kind or _TYPES.get(code, "BadRequestException"), "message": message}
    if scoring:
        body["error_code"] = _SCORING.get(code, "INTERNAL_ERROR" if code >= 500 else "BAD_REQUEST")
    return reply(code, pretty(body), extra)


def error(found: RequestError, extra: bytes = b"", *, strict: bool = False, scoring: bool = False) -> Response:
    """The response to a refused request; `strict`: with TorchServe's status where Trueline's is another."""
    code, message, kind = _translate(found, strict=strict)
    return refusal(code, message, kind=kind, extra=extra, scoring=scoring)


def _translate(found: RequestError, *, strict: bool) -> tuple[int, str, str | None]:
    """Status, message and TorchServe's exception."""
    if isinstance(found, HandlerFailed):
        code = 500 if strict and found.message == DIED else found.status
        return code, found.message, "InternalServerException"
    if strict and isinstance(found, Hung):
        return 500, DIED, "InternalServerException"
    if strict and isinstance(found, Overloaded):
        return 503, found.message, None
    if strict and isinstance(found, AlreadyStored):
        return 500, found.message, found.torchserve_type
    if strict and isinstance(found, Unauthorized | Forbidden):
        return 400, NO_KEY, "InvalidKeyException"
    if isinstance(found, UnknownModel):
        return 404, f"Model not found: {found.model}", "ModelNotFoundException"
    if isinstance(found, UnknownVersion):
        message = f"Model version: {found.version} does not exist for model: {found.model}"
        return 404, message, "ModelVersionNotFoundException"
    hint = f"; {found.hint}" if found.hint else ""
    return found.status, found.message + hint, getattr(found, "torchserve_type", None)


def server_fault(path: str, error: Exception) -> Response:
    """The response to a request on which the server itself failed; the log has the reason."""
    events.emit("request.failed", path=path[:200], why=traceback.format_exception(error)[-1].strip())
    return refusal(500, "the server failed on this request; its log has the reason", kind="InternalServerException")


def describe_version(version: Servable) -> dict[str, Any]:
    """TorchServe's description of a model version."""
    facts: dict[str, Any] = {
        "modelName": version.model, "modelVersion": version.version, "modelUrl": redact_uri(version.source),
        "runtime": "trueline", "minWorkers": 0, "maxWorkers": 0, "batchSize": 1, "maxBatchDelay": 0,
        "responseTimeout": 120, "startupTimeout": 120, "maxRetryTimeoutInSec": 300, "clientTimeoutInMills": 0,
        "parallelType": "", "parallelLevel": 0, "deviceType": "cpu", "continuousBatching": False,
        "useJobTicket": False, "useVenv": False, "stateful": False, "sequenceMaxIdleMSec": 0,
        "sequenceTimeoutMSec": 0, "maxNumSequence": 1, "maxSequenceJobQueueSize": 1,
        "loadedAtStartup": version.at_start, "workers": [],
        "jobQueueStatus": {"remainingCapacity": 0, "pendingRequests": version.num_waiting},
    }  # fmt: skip
    if version.state != "ready":
        return facts | {"state": version.state, "reason": version.reason}
    policy = version.policy
    started = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(version.since))
    worker = {"startTime": started, "status": "READY", "memoryUsage": 0, "pid": os.getpid(), "gpu": False,
              "gpuUsage": "N/A"}  # fmt: skip
    facts |= {
        "minWorkers": policy.lanes, "maxWorkers": policy.lanes,
        "batchSize": policy.max_batch if policy.batch else 1,
        "maxBatchDelay": round((policy.max_delay_s or 0.0) * 1000),
        "workers": [{"id": str(9000 + number), **worker} for number in range(policy.lanes)],
    }  # fmt: skip
    facts["jobQueueStatus"]["remainingCapacity"] = policy.max_requests - version.num_waiting
    return facts if version.handler is None else facts | version.handler.description


class TorchServeErrors:
    """`{"code", "type", "message"}`, with TorchServe's exception names."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def encode_error(self, found: RequestError, path: str) -> Response:
        return error(found, extra(found), strict=self._strict, scoring=path == "/invocations")

    def encode_failure(self) -> Response:
        return refusal(503, "Prediction failed", kind="InternalServerException")

    def encode_malformed(self, path: str, status: int, message: str) -> Response:
        if self._strict and status == 413:
            return Response(413, b"", b"", close=True)  # as bare as TorchServe's
        return refusal(status, message)
