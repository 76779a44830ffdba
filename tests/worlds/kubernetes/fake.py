"""An API server for tests of what a real one seldom says: pods are as the test writes them."""

from __future__ import annotations

import json
from typing import Any

import httpx

SPACE = "/api/v1/namespaces/jobs"


def merge(known: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """As RFC 7386 has it."""
    merged = {
        key: merge(known.get(key, {}), value) if isinstance(value, dict) else value for key, value in patch.items()
    }
    return {key: value for key, value in (known | merged).items() if value is not None}


class FakeApi:
    """A transport of httpx. `refuse` answers the next calls; `away`: nothing does."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.logs: dict[str, bytes] = {}
        self.calls: list[tuple[str, str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.refusals: dict[str, tuple[int, str, str]] = {}
        """By method and what is called, as `POST pods`: status, reason and message."""
        self.away = False

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("[Errno 111] Connection refused", request=request)
        assert request.url.path.startswith(f"{SPACE}/"), request.url
        kind, _, name = request.url.path.removeprefix(f"{SPACE}/").partition("/")
        body = json.loads(request.content) if request.content else None
        self.calls.append((request.method, request.url.path, body))
        self.headers.append(request.headers)
        if (refusal := self.refusals.get(f"{request.method} {kind}")) is not None:
            return self._refuse(*refusal)
        if kind == "events":
            return httpx.Response(200, json={"items": self.events})
        return self._answer_pods(request, name, body)

    def _answer_pods(self, request: httpx.Request, name: str, body: Any) -> httpx.Response:
        if request.method == "POST":
            name = body["metadata"]["name"]
            if name in self.pods:
                return self._refuse(409, "AlreadyExists", f'pods "{name}" already exists')
            self.pods[name] = body | {"status": {"phase": "Pending"}}
            self.pods[name]["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}
            return httpx.Response(201, json=self.pods[name])
        if not name:
            wanted = dict(one.split("=") for one in request.url.params["labelSelector"].split(","))
            items = [pod for pod in self.pods.values() if wanted.items() <= pod["metadata"]["labels"].items()]
            return httpx.Response(200, json={"items": items})
        name, _, part = name.partition("/")
        if name not in self.pods:
            return self._refuse(404, "NotFound", f'pods "{name}" not found')
        if part == "log":
            if name not in self.logs:
                return self._refuse(400, "BadRequest", f'container "trueline" in pod "{name}" is waiting to start')
            return httpx.Response(200, content=self.logs[name])
        if request.method == "DELETE":
            return httpx.Response(200, json=self.pods.pop(name))
        if request.method == "PATCH":
            self.pods[name] = merge(self.pods[name], body)
        return httpx.Response(200, json=self.pods[name])

    def _refuse(self, status: int, reason: str, message: str) -> httpx.Response:
        return httpx.Response(
            status, json={"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
        )
