"""All workflows that are served: registered whole or not at all, unregistered, restored.

    register     the archive is laid out and its specification read; all nodes start beside each other; when every one
                 is ready they are shown together, as models `WORKFLOW__NODE`. One that fails takes all others back
    unregister   nobody is asked any more; what is under way is answered; then the nodes end

Acts on one workflow wait for each other. After each the wanted state is written; an act whose outcome cannot be written
is undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trueline import events
from trueline.errors import BundleError, NotFound, NotReady, RequestError, TruelineError
from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import Archive, ArchiveError
from trueline.serve.handlers.version import HandlerVersion, InThread
from trueline.serve.handlers.workdir import Place
from trueline.serve.handlers.worker import Limits
from trueline.serve.models import desired_state as wanted
from trueline.serve.models.controller import CodeNotAllowed, Conflict, Fleet, Found, Refused
from trueline.serve.models.desired_state import Wanted, WantedWorkflow
from trueline.serve.models.model_store import NotInStore, Store, check_name
from trueline.serve.redaction import public_reason
from trueline.torchserve.workflows import archive as war
from trueline.torchserve.workflows.archive import War
from trueline.torchserve.workflows.executor import UnknownWorkflow, Workflow
from trueline.torchserve.workflows.spec import Node

GIVEN = ("response_timeout", "startup_timeout")
"""Parameters of a registration that are for every node."""


class NotStored(NotFound):
    """No such archive in the workflow store."""

    torchserve_type = "WorkflowNotFoundException"


class NotRegistered(RequestError):
    """Nodes could not be made ready; nothing of the workflow is left."""

    code = "workflow_failed"

    def __init__(self, name: str, failures: Mapping[str, Exception]) -> None:
        told = ", ".join(
            f"Workflow Node {name}__{node} failed to register. Details: {why}" for node, why in failures.items()
        )
        super().__init__(f"Workflow {name} has failed to register. Failures: [{told}]")
        codes = [error.status for error in failures.values() if isinstance(error, RequestError)]
        self.status = 500 if any(code >= 500 for code in codes) else 400
        self.torchserve_type = "InternalServerException" if self.status == 500 else "BadRequestException"


@dataclass(frozen=True, slots=True)
class Missing:
    """A workflow that is wanted and could not be had."""

    told: WantedWorkflow
    why: str


class Workflows:
    """Registers, finds, unregisters. Its methods are called on the loop."""

    def __init__(
        self,
        fleet: Fleet,
        loop: asyncio.AbstractEventLoop,
        in_thread: InThread,
        find: Callable[[str], Awaitable[Found]],
        *,
        store: Store | None = None,
        state: Path | None = None,
        handlers: Limits | None = None,
    ) -> None:
        """`find` leads from the url of a model to its archive, `store` holds the workflows'. `state` is the file of the
        wanted state; `handlers` bounds the processes of archives' code, None: none is run.
        """
        self._fleet = fleet
        self._models = fleet.models
        self._loop = loop
        self._in_thread = in_thread
        self._find = find
        self._store = store
        self._handlers = handlers
        self._keeper = wanted.Keeper(state, "workflows")
        self._served: dict[str, Workflow] = {}
        self._missing: dict[str, Missing] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def find(self, name: str) -> Workflow:
        """Raises UnknownWorkflow, NotReady for one that is wanted and could not be had."""
        if name in self._missing:
            raise NotReady(f"workflow '{name}' is failed: {self._missing[name].why}")
        if name not in self._served:
            raise UnknownWorkflow(name)
        return self._served[name]

    def names(self) -> list[str]:
        """Those that are served."""
        return list(self._served)

    @property
    def sick(self) -> bool:
        """Whether one that is wanted could not be had."""
        return bool(self._missing)

    def wanted(self) -> dict[str, WantedWorkflow]:
        """What is served, as the state file says it."""
        served = {name: one.told for name, one in self._served.items()}
        return served | {name: one.told for name, one in self._missing.items()}

    def busy(self, name: str) -> bool:
        """Whether an act on the workflow is under way."""
        return name in self._locks and self._locks[name].locked()

    def following(self, name: str) -> AbstractContextManager[None]:
        """While a workflow is brought to what the file says, the file is not written for it."""
        return self._keeper.following(name, self.wanted)

    # acts

    async def register(self, url: str, name: str = "", given: Mapping[str, str] | None = None) -> Workflow:
        """Makes the workflow of the store's entry `url` ready and shows it, as `name` or under its own name.

        Raises CodeNotAllowed, NotFound, Conflict, Refused, NotRegistered; nothing of it is then left.
        """
        told = {key: value for key, value in (given or {}).items() if key in GIVEN}
        return await self._register(WantedWorkflow(source=url, digest="", given=told), name, replace_it=False)

    async def bring(self, name: str, told: WantedWorkflow) -> None:
        """Makes ready what the state file says; it takes the place of one of the same name. Raises as `register`."""
        await self._register(told, name, replace_it=True)

    async def _register(self, told: WantedWorkflow, name: str, *, replace_it: bool) -> Workflow:
        path = self._path(told.source)
        place = await self._in_thread(Place)
        try:
            found: War = await self._in_thread(partial(_unpacked, path, place.folder, told.digest))
            self._check(Found(path=path), found.digest)
            name = check_name("workflow", name or found.name)
            async with self._locks.setdefault(name, asyncio.Lock()):
                if name in self._served and not replace_it:
                    raise Conflict(f"Workflow {name} is already registered.")
                made = await self._made(name, found, told, place)
                before = self._served.get(name)
                try:
                    self._show(made)
                except BaseException:
                    await made.close()
                    raise
        except BaseException:
            place.remove()
            raise
        events.emit("workflow.ready", workflow=name, nodes=",".join(made.versions), digest=found.digest)
        if before is not None:
            await before.retire()
        return made

    def _path(self, url: str) -> Path:
        """Raises CodeNotAllowed, NotFound."""
        if self._handlers is None:
            raise CodeNotAllowed(
                f"'{url[:128]}' is a workflow, whose handlers are code, and this server runs none",
                hint="start it with --allow-code if you trust what the store holds",
            )
        if self._store is None:
            raise NotStored("Workflow store has not been configured.")
        if "://" in url:
            raise NotStored(f"Given URL {url[:128]} does not match any allowed URL(s)")
        try:
            return self._store.find(url)
        except NotInStore as error:
            raise NotStored(f"Workflow not found in workflow store: {url[:128]}") from error
        except NotFound as error:
            raise NotStored(error.message) from error

    async def _made(self, name: str, found: War, told: WantedWorkflow, place: Place) -> Workflow:
        """All nodes, ready. Raises NotRegistered; none is then left."""
        if found.spec.ignored:
            events.emit("workflow.ignored", workflow=name, keys=",".join(found.spec.ignored)[:500])
        tasks = {node.name: self._loop.create_task(self._begun(name, node, found, told)) for node in found.spec.nodes}
        try:
            await asyncio.wait(tasks.values())
            failures = {node: error for node, task in tasks.items() if (error := _failure(task)) is not None}
            if failures:
                raise NotRegistered(name, failures)
        except BaseException:
            for task in tasks.values():
                task.cancel()
            await asyncio.wait(tasks.values())
            begun = [task.result() for task in tasks.values() if not task.cancelled() and task.exception() is None]
            await asyncio.gather(*(version.close() for version in begun))
            raise
        versions = {node: task.result() for node, task in tasks.items()}
        digests = {node.name: versions[node.name].digest for node in found.spec.nodes if node.url}
        kept = WantedWorkflow(source=told.source, digest=found.digest, models=digests, given=told.given)
        return Workflow(name=name, told=kept, spec=found.spec, versions=versions, place=place)

    async def _begun(self, workflow: str, node: Node, found: War, told: WantedWorkflow) -> HandlerVersion:
        """One node, ready. Raises RequestError."""
        model = check_name("model", f"{workflow}__{node.name}")
        assert self._handlers is not None  # checked before anything was read
        usual = self._fleet.how.usual_of(model, "1.0") | {"minWorkers": 1, "maxBatchDelay": 50 if node.url else 0}
        try:
            if not node.url:
                made = HandlerVersion(model=model, version="1.0", workflow=workflow, limits=self._handlers)
                own = archive.Manifest(model=model, version="1.0", handler=f"{found.handler}:{node.name}")
                whole = Archive(folder=found.folder, manifest=own, config={}, digest=found.digest)
                await made.begin_in(whole, told.given, self._loop, usual=usual)
                return made
            stored = await self._find(_stored(node.url))
            path = stored.path
            if not archive.is_archive(path):
                raise Refused(f"'{node.url[:128]}' is no model archive; nodes of a workflow are archives or functions")
            version = (await self._in_thread(partial(archive.peek, path))).version
            made = HandlerVersion(
                model=model,
                version=check_name("version", version),
                source=node.url,
                workflow=workflow,
                limits=self._handlers,
            )
            given = {**told.given, **dict(_given(node))}
            await made.begin(
                path,
                given,
                self._in_thread,
                self._loop,
                told.models.get(node.name),
                usual=usual,
                check=partial(self._check, stored),
            )
            return made
        except TruelineError as error:
            if isinstance(error, RequestError):
                raise
            raise Refused(public_reason(error)) from error

    def _check(self, found: Found, digest: str) -> None:
        """Raises Refused for what no trusted key has signed."""
        try:
            found.check(self._fleet.how.trusted, digest)
        except BundleError as error:
            raise Refused(error.message, hint=error.hint) from error

    def _show(self, made: Workflow) -> None:
        """Shows a workflow in place of the one of its name. Raises Conflict, StorageError; all is then as it was."""
        before, missing = self._served.get(made.name), self._missing.get(made.name)
        taken = [
            one.model
            for one in made.versions.values()
            if one.model in self._models.names() and self._owner(one.model) != made.name
        ]
        if taken:
            raise Conflict(f"model '{taken[0]}' is served already, and a node of workflow {made.name} is called so")
        self._exchange(before, made)
        self._missing.pop(made.name, None)
        try:
            self._keeper.keep(self.wanted())
        except TruelineError:
            self._exchange(made, before)
            if missing is not None:
                self._missing[made.name] = missing
            raise

    def _owner(self, model: str) -> str:
        return self._models.find(model, self._models.default(model)).workflow

    def _exchange(self, old: Workflow | None, new: Workflow | None) -> None:
        for one in old.versions.values() if old is not None else ():
            self._models.remove(one.model, one.version)
        for one in new.versions.values() if new is not None else ():
            self._models.put(one)
        if old is not None:
            del self._served[old.name]
        if new is not None:
            self._served[new.name] = new

    async def unregister(self, name: str) -> None:
        """Takes a workflow away with its nodes; returns when its last requests are answered. Raises UnknownWorkflow."""
        if name not in self.wanted() and not self.busy(name):
            raise UnknownWorkflow(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            found, missing = self._served.get(name), self._missing.pop(name, None)
            if found is None and missing is None:
                raise UnknownWorkflow(name)
            self._exchange(found, None)
            try:
                self._keeper.keep(self.wanted())
            except TruelineError:
                self._exchange(None, found)
                if missing is not None:
                    self._missing[name] = missing
                raise
            if found is not None:
                await found.retire()
            events.emit("workflow.retired", workflow=name)

    async def restore(self, state: Wanted) -> list[str]:
        """Registers what the file wants; returns what could not be had, in words. Those are wanted on."""
        missing = []
        for name, told in state.workflows.items():
            with self.following(name):
                try:
                    await self.bring(name, told)
                except TruelineError as error:
                    missing.append(f"workflow {name}: {error.message}")
                    why = error.message if isinstance(error, RequestError) else "its archive cannot be had"
                    self._missing[name] = Missing(told, why)
        return missing

    async def follow(self, state: Wanted) -> bool:
        """Brings what is served to what the file wants. What goes wrong is an event. False: look again."""
        settled = True
        for name in {**state.workflows, **self.wanted()}:
            want, have = state.workflows.get(name), self.wanted().get(name)
            if self.busy(name):
                settled = False  # what is being done here may make the two equal
            elif want != have:
                with self.following(name):
                    try:
                        await (self.unregister(name) if want is None else self.bring(name, want))
                    except TruelineError as error:
                        events.emit("state.not_followed", workflow=name, why=error.message)
                    else:
                        events.emit("state.followed", workflow=name, served=want is not None)
        return settled

    async def close(self) -> None:
        """Ends the processes of all nodes: the server leaves."""
        await asyncio.gather(*(one.close() for one in self._served.values()))


def _unpacked(path: Path, into: Path, digest: str) -> War:
    """Blocks. Raises Refused."""
    try:
        found = war.unpack(path, into)
        if digest and digest != found.digest:
            raise ArchiveError(
                f"the archive of digest {digest[:12]} is wanted, found is {found.digest[:12]}",
                hint="it was exchanged; register it again",
            )
    except ArchiveError as error:
        raise Refused(error.message, hint=error.hint) from error
    return found


def _stored(url: str) -> str:
    """What the store calls a model that a specification names. Nothing is fetched: a URL is its file in the store,
    where TorchServe put it too.
    """
    if not url.startswith(("http://", "https://", "file://")):
        return url
    return url.partition("?")[0].rsplit("/", 1)[-1]


def _given(node: Node) -> Iterator[tuple[str, str]]:
    """What the specification says of a node, in the words of a registration."""
    said = {
        "initial_workers": node.said.workers,
        "batch_size": node.said.batch_size,
        "max_batch_delay": node.said.max_batch_delay,
    }
    return ((name, str(value)) for name, value in said.items() if value is not None)


def _failure(task: asyncio.Task[Any]) -> Exception | None:
    """Raises what is no failure of one node: our own faults, and the end of the server."""
    error = task.exception()
    if error is None or isinstance(error, TruelineError):
        return error
    raise error
