"""Calls of the API server by HTTP: what it refuses is a UsageError, what does not answer is EngineAway.

httpx, which Trueline has anyway, and a dozen lines in place of the `kubernetes` client: that is 36 MB, and slow to
import. Each call has a connection of its own, so that a fork shares none. Source: the API conventions of Kubernetes
(Status, 401 to 429).
"""

from collections.abc import Mapping
from typing import Any

import httpx

from trueline.engine.cluster.kubernetes.access import KubeAccess
from trueline.errors import EngineAway, UsageError

CONNECT_S, READ_S = 3.0, 15.0
MERGE = "application/merge-patch+json"
RIGHTS = "the guide of clusters has the Role that a job needs; kubectl auth can-i create pods"


class KubeRefusal(UsageError):
    """The API server has answered, and refuses. `reason`: its word for it, as AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str, hint: str) -> None:
        super().__init__(f"Kubernetes refuses it: {message}", hint=hint)
        self.status, self.reason = status, reason


class KubeApi:
    """`transport` is for tests."""

    def __init__(self, access: KubeAccess, transport: httpx.BaseTransport | None = None) -> None:
        self._access = access
        self._client = httpx.Client(
            base_url=access.server, verify=access.context, transport=transport, trust_env=True,
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S), limits=httpx.Limits(max_keepalive_connections=0),
        )  # fmt: skip

    def call(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, patch: bool = False, **query: str | int
    ) -> bytes:
        """The body of the answer. Raises KubeRefusal, EngineAway."""
        headers = {"content-type": MERGE} if patch else {}
        if token := self._access.read_token():
            headers["authorization"] = f"Bearer {token}"
        try:
            answer = self._client.request(method, path, json=body, params=query, headers=headers)
        except httpx.TransportError as error:
            raise EngineAway(
                f"Kubernetes' API server {self._access.server} does not answer: {error or type(error).__name__}",
                hint="try again; what runs continues",
            ) from error
        if answer.is_success:
            return answer.content
        raise _describe_refusal(answer, self._access.server)


def _describe_refusal(answer: httpx.Response, server: str) -> KubeRefusal | EngineAway:
    status, reason, message = answer.status_code, "", answer.text.strip()[:300]
    try:
        found = answer.json()
        reason, message = found.get("reason") or "", found.get("message") or message
    except (ValueError, AttributeError):
        pass
    if status >= 500 or status == 429:
        return EngineAway(
            f"Kubernetes' API server {server} answers {status}: {message}", hint="try again; what runs continues"
        )
    hint = "correct [engine.kubernetes] in trueline.toml"
    if status == 401:
        message = f"it does not know your credentials ({message})"
        hint = "look at your kubeconfig: kubectl auth can-i get pods"
    elif "exceeded quota" in message:
        hint = "wait until other pods have ended, or ask for less: slots, memory_mb, --workers"
    elif status == 403 and "cannot" in message:
        hint = RIGHTS
    return KubeRefusal(status, reason, message, hint)
