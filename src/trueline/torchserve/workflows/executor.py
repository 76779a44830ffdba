"""Sends one request through a workflow's graph.

A node runs when all its parents have answered. It gets the request's headers and the answer of its parent as `body`; of
several parents, each answer under its parent's name; the start gets the request itself. A node that fails is tried
again `retry-attempts` times; then the request fails, and its other nodes leave the queues. A handler that is in the
middle of a batch finishes it, because the batch may hold other requests. Source: TorchServe 0.12's DagExecutor.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from trueline import events
from trueline.errors import NotFound, Overloaded, RequestError
from trueline.files import TemporaryFolder
from trueline.serve.handlers.failures import HandlerFailed
from trueline.serve.models.desired_state import DesiredWorkflow
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest
from trueline.web.body import Body
from trueline.web.messages import StreamBroken

if TYPE_CHECKING:
    from trueline.serve.handlers.version import HandlerVersion
    from trueline.torchserve.workflows.spec import Node, Spec

Part = tuple[str, str, Body]
"""Name, content type, value."""


class UnknownWorkflow(NotFound):
    """The server has no workflow of this name."""

    torchserve_type = "WorkflowNotFoundException"

    def __init__(self, name: str) -> None:
        super().__init__(f"Workflow not found: {name[:64]}")


class NodeFailed(RequestError):
    """A node failed at every attempt. The log has the reasons."""

    code = "node_failed"
    status = 500
    torchserve_type = "InternalServerException"

    def __init__(self, node: str) -> None:
        super().__init__(f"Error executing {node}")


@dataclass(slots=True, eq=False, kw_only=True)
class Workflow:
    """One workflow, with the version that runs each node."""

    name: str
    registered: DesiredWorkflow
    """As in the state file."""
    spec: Spec
    versions: Mapping[str, HandlerVersion]
    place: TemporaryFolder
    _running: set[asyncio.Task[HandlerAnswer]] = field(default_factory=set)

    def predict(self, request: HandlerRequest, *, strict: bool = False) -> asyncio.Task[HandlerAnswer]:
        """The answer of the last nodes; cancel the task to withdraw the request everywhere.

        The task raises NodeFailed, Overloaded, and HandlerFailed of 4xx where a handler rejects its input; with
        `strict` that is NodeFailed too, as in TorchServe.
        """
        task = asyncio.get_running_loop().create_task(self._run(request, strict=strict))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, request: HandlerRequest, *, strict: bool) -> HandlerAnswer:
        tasks: dict[str, asyncio.Task[HandlerAnswer]] = {}

        async def run(node: Node) -> HandlerAnswer:
            answers = [(parent, await tasks[parent]) for parent in node.parents]
            parts = _join_inputs(answers) if answers else request.parts
            return await self._run_node(node, parts, request.headers, strict=strict)

        try:
            async with asyncio.TaskGroup() as group:
                for node in self.spec.nodes:
                    tasks[node.name] = group.create_task(run(node))
        except ExceptionGroup as errors:
            raise _first(errors) from None  # the events of its attempts have the reasons
        return _join_outputs([(name, tasks[name].result()) for name in self.spec.leaves])

    async def _run_node(
        self, node: Node, parts: Sequence[Part], headers: Mapping[str, str], *, strict: bool
    ) -> HandlerAnswer:
        """Raises NodeFailed, Overloaded, HandlerFailed of 4xx."""
        for attempt in range(1, node.attempts + 1):
            request = HandlerRequest(request_id=str(uuid.uuid4()), parts=parts, headers=headers)
            try:
                async with asyncio.timeout(node.timeout_s):
                    answer = await self.versions[node.name].handle(request)
                    whole = None if answer.pieces is None else await answer.pieces.whole()
                    return answer if whole is None else replace(answer, body=whole, pieces=None)
            except Overloaded:
                raise  # an immediate retry would only add load
            except (TimeoutError, RequestError, StreamBroken) as error:
                if isinstance(error, HandlerFailed) and error.status < 500 and not strict:
                    raise  # the handler rejected its input and would do so again
                why = f"no answer within {node.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                events.emit("node.failed", workflow=self.name, node=node.name, attempt=attempt, why=why)
        raise NodeFailed(node.name)

    async def retire(self) -> None:
        """Returns when the last request is answered, the workers are gone and the files deleted.

        The caller has made sure that no new request arrives.
        """
        while self._running:
            await asyncio.wait(self._running)
        await asyncio.gather(*(version.retire() for version in self.versions.values()))
        self.place.remove()

    async def close(self) -> None:
        """Ends its workers at once and deletes the files."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*(version.close() for version in self.versions.values()))
        self.place.remove()


def _join_inputs(answers: Sequence[tuple[str, HandlerAnswer]]) -> list[Part]:
    """A node's input from its parents' answers, without a content type.

    >>> one, two = ("a", HandlerAnswer(body=b"1")), ("b", HandlerAnswer(body=b"2"))
    >>> _join_inputs([one]), _join_inputs([one, two])
    ([('body', '', b'1')], [('a', '', b'1'), ('b', '', b'2')])
    """
    if len(answers) == 1:
        return [("body", "", answers[0][1].body)]
    return [(name, "", answer.body) for name, answer in answers]


def _join_outputs(ends: Sequence[tuple[str, HandlerAnswer]]) -> HandlerAnswer:
    """The answer of a single last node as it is; of several, an object of their texts by node, as in TorchServe.

    >>> _join_outputs([("a", HandlerAnswer(body=b"1")), ("b", HandlerAnswer(body=b"{}"))]).body
    b'{"a":"1","b":"{}"}'
    """
    if len(ends) == 1:
        return ends[0][1]
    texts = {name: bytes(answer.body).decode("utf-8", "replace") for name, answer in ends}
    return HandlerAnswer(body=msgspec.json.encode(texts), headers={"content-type": "application/json"})


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The first failure; the nodes after it failed with the same error."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
