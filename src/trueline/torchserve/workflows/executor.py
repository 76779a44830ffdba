"""A workflow that is served, and one request on its way through the graph.

A node is asked when all its parents have answered. It gets the request's headers and, of one parent, the answer as
`body`; of several, each answer under its parent's name; the start gets the request itself. A node that fails is asked
again, `retry-attempts` times; then the request fails, and what still waits for it leaves the queues. A handler that is
in the middle of a batch ends that batch, for others may be in it.
Source: TorchServe 0.12's DagExecutor.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from trueline import events
from trueline.errors import NotFound, Overloaded, RequestError
from trueline.serve.handlers.result import Answer, HandlerFailed
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.handlers.workdir import Place
from trueline.serve.handlers.worker import Ask
from trueline.serve.models.desired_state import WantedWorkflow
from trueline.torchserve.workflows.spec import Node, Spec
from trueline.web.streaming import StreamBroken


class UnknownWorkflow(NotFound):
    """No workflow of this name is served."""

    torchserve_type = "WorkflowNotFoundException"

    def __init__(self, name: str) -> None:
        super().__init__(f"Workflow not found: {name[:64]}")


class NodeFailed(RequestError):
    """A node gave no answer, as often as it was asked. The log says why."""

    code = "node_failed"
    status = 500
    torchserve_type = "InternalServerException"

    def __init__(self, node: str) -> None:
        super().__init__(f"Error executing {node}")


@dataclass(slots=True, eq=False, kw_only=True)
class Workflow:
    """One workflow, and the versions that answer its nodes."""

    name: str
    told: WantedWorkflow
    spec: Spec
    versions: Mapping[str, HandlerVersion]
    place: Place
    _running: set[asyncio.Task[Answer]] = field(default_factory=set)

    def predict(self, ask: Ask, *, strict: bool = False) -> asyncio.Task[Answer]:
        """The answer of the last nodes; cancel it to withdraw the request everywhere.

        The task raises NodeFailed, Overloaded, and HandlerFailed of 4xx where a handler refuses its input; with
        `strict` that is NodeFailed too, as in TorchServe.
        """
        task = asyncio.get_running_loop().create_task(self._through(ask, strict=strict))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _through(self, ask: Ask, *, strict: bool) -> Answer:
        tasks: dict[str, asyncio.Task[Answer]] = {}

        async def one(node: Node) -> Answer:
            answers = [(parent, await tasks[parent]) for parent in node.parents]
            given = _given(answers) if answers else ask.parts
            return await self._asked(node, given, ask.headers, strict=strict)

        try:
            async with asyncio.TaskGroup() as group:
                for node in self.spec.nodes:
                    tasks[node.name] = group.create_task(one(node))
        except ExceptionGroup as errors:
            raise _first(errors) from None  # the events of its attempts have said why
        return _together([(name, tasks[name].result()) for name in self.spec.leaves])

    async def _asked(
        self,
        node: Node,
        parts: Sequence[tuple[str, str, bytes | bytearray]],
        headers: Mapping[str, str],
        *,
        strict: bool,
    ) -> Answer:
        """The whole answer of one node. Raises NodeFailed, Overloaded, HandlerFailed of 4xx."""
        for attempt in range(1, node.attempts + 1):
            ask = Ask(request_id=str(uuid.uuid4()), parts=parts, headers=headers)
            try:
                async with asyncio.timeout(node.timeout_s):
                    return await _whole(await self.versions[node.name].handle(ask))
            except Overloaded:
                raise  # asking again at once would only make it worse
            except (TimeoutError, RequestError, StreamBroken) as error:
                if isinstance(error, HandlerFailed) and error.status < 500 and not strict:
                    raise  # the handler refused what it was given: it would refuse it again
                why = f"no answer within {node.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                events.emit("node.failed", workflow=self.name, node=node.name, attempt=attempt, why=why)
        raise NodeFailed(node.name)

    async def retire(self) -> None:
        """Returns when the last request is answered, the workers are gone and the files deleted.

        The caller has seen to it that nobody asks it any more.
        """
        while self._running:
            await asyncio.wait(self._running)
        await asyncio.gather(*(version.retire() for version in self.versions.values()))
        self.place.remove()

    async def close(self) -> None:
        """Ends its workers at once and deletes the files: the server leaves."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*(version.close() for version in self.versions.values()))
        self.place.remove()


def _given(answers: Sequence[tuple[str, Answer]]) -> list[tuple[str, str, bytes | bytearray]]:
    """What a node is given of its parents' answers: bytes, without a content type.

    >>> _given([("a", Answer(body=b"1"))]), _given([("a", Answer(body=b"1")), ("b", Answer(body=b"2"))])
    ([('body', '', b'1')], [('a', '', b'1'), ('b', '', b'2')])
    """
    if len(answers) == 1:
        return [("body", "", answers[0][1].body)]
    return [(name, "", answer.body) for name, answer in answers]


def _together(ends: Sequence[tuple[str, Answer]]) -> Answer:
    """The answer of the only last node as it is; of several, an object of their texts by node, as TorchServe answers.

    >>> _together([("a", Answer(body=b"1")), ("b", Answer(body=b"{}"))]).body
    b'{"a":"1","b":"{}"}'
    """
    if len(ends) == 1:
        return ends[0][1]
    texts = {name: bytes(answer.body).decode("utf-8", "replace") for name, answer in ends}
    return Answer(body=msgspec.json.encode(texts), headers={"content-type": "application/json"})


async def _whole(answer: Answer) -> Answer:
    """Raises Torn."""
    return answer if answer.pieces is None else replace(answer, body=await answer.pieces.whole(), pieces=None)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """What failed first: the nodes behind it failed with the same."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
