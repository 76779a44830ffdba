"""Registers, unregisters and restores workflows: each is served whole or not at all.

    register     unpacks the archive, reads its specification and starts all nodes at the same time; when all are ready,
                 they appear together as models `WORKFLOW__NODE`. If one fails, none appears
    unregister   accepts no more requests, answers those under way, then ends the nodes

Operations on one workflow run one after another. Each writes the desired state; if that fails, it is undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import events
from trueline.errors import BundleError, NotFound, NotReady, RequestError, TruelineError
from trueline.files import TemporaryFolder
from trueline.serve.faults import find_fault
from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import Archive, ArchiveError
from trueline.serve.handlers.budget import Limits
from trueline.serve.handlers.loader import CodeNotAllowed
from trueline.serve.models import desired_state
from trueline.serve.models.controller import Conflict, Fleet
from trueline.serve.models.desired_state import DesiredState, DesiredWorkflow
from trueline.serve.models.downloads import NotAllowed, is_http
from trueline.serve.models.loader import Refused, ResolvedSource, public_reason
from trueline.serve.models.servable import LOADING_S, RETRY_S
from trueline.serve.models.sources import InThread, NotInStore, OutsideStore, Store, check_name, find_download, forget
from trueline.torchserve.workflows.executor import UnknownWorkflow, Workflow

if TYPE_CHECKING:
    from trueline.serve.handlers.version import HandlerVersion
    from trueline.torchserve.workflows.archive import War
    from trueline.torchserve.workflows.spec import Node

NODE_PARAMETERS = ("response_timeout", "startup_timeout")
"""Parameters of a registration that apply to every node."""


class NotStored(NotFound):
    """The workflow store has no such archive."""

    torchserve_type = "WorkflowNotFoundException"


class NotRegistered(RequestError):
    """Nodes did not become ready; nothing of the workflow remains."""

    code = "workflow_failed"

    def __init__(self, name: str, failures: Mapping[str, Exception]) -> None:
        reasons = ", ".join(
            f"Workflow Node {name}__{node} failed to register. Details: {why}" for node, why in failures.items()
        )
        super().__init__(f"Workflow {name} has failed to register. Failures: [{reasons}]")
        codes = [error.status for error in failures.values() if isinstance(error, RequestError)]
        self.status = 500 if any(code >= 500 for code in codes) else 400
        self.torchserve_type = "InternalServerException" if self.status == 500 else "BadRequestException"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    """A workflow that is desired and failed to load."""

    registered: DesiredWorkflow
    why: str
    passing: bool
    """Whether the reason is the server's and may pass."""


class Workflows:
    """The workflows of a server. Call its methods on the event loop."""

    def __init__(
        self, fleet: Fleet, loop: asyncio.AbstractEventLoop, in_thread: InThread,
        find: Callable[[str], Awaitable[ResolvedSource]], *, store: Store | None = None, state: Path | None = None,
        handlers: Limits | None = None, download: Callable[[str, Store], Awaitable[Path]] | None = None,
    ) -> None:  # fmt: skip
        """`find` locates a model's archive by its URL, `store` holds the workflows' archives, `state` is the file of
        the desired state. `handlers` limits the processes that run archives' code; None: none runs. `download` puts
        what is at an http(s) address into the store; None: no address is allowed.
        """
        self._fleet, self._models = fleet, fleet.models
        self._loop, self._in_thread = loop, in_thread
        self._find, self._store, self._handlers, self._download = find, store, handlers, download
        self._keeper = desired_state.Keeper(state, "workflows")
        self._served: dict[str, Workflow] = {}
        self._missing: dict[str, _Missing] = {}
        self._expected: set[str] = set()
        """Workflows that are being restored."""
        self._locks: dict[str, asyncio.Lock] = {}

    def find(self, name: str) -> Workflow:
        """Raises UnknownWorkflow, NotReady for one that failed to load or is being restored."""
        if (missing := self._missing.get(name)) is not None:
            wait_s = RETRY_S if missing.passing else None
            raise NotReady(f"workflow '{name}' is failed: {missing.why}", retry_after_s=wait_s)
        if (found := self._served.get(name)) is not None:
            return found
        if name in self._expected or self._models.locating:
            raise NotReady(f"workflow '{name[:64]}' is loading", retry_after_s=LOADING_S)
        raise UnknownWorkflow(name)

    @property
    def obstacle(self) -> str:
        """Why a desired workflow would not answer now; the workers of those that are served are the models'."""
        if self._missing:
            return next(f"workflow '{name}' is failed: {one.why}" for name, one in self._missing.items())
        return next((f"workflow '{name}' is loading" for name in self._expected), "")

    def names(self) -> list[str]:
        """The workflows that are served."""
        return list(self._served)

    @property
    def sick(self) -> bool:
        """Whether a desired workflow failed to load."""
        return bool(self._missing)

    def desired_workflows(self) -> dict[str, DesiredWorkflow]:
        """Workflows that are served or failed to load, as in the state file."""
        served = {name: one.registered for name, one in self._served.items()}
        return served | {name: one.registered for name, one in self._missing.items()}

    def busy(self, name: str) -> bool:
        """Whether an operation on the workflow is under way."""
        return name in self._locks and self._locks[name].locked()

    async def register(self, url: str, name: str = "", given: Mapping[str, str] | None = None) -> Workflow:
        """Loads and serves the workflow in the store's entry `url`, as `name` or under its own name.

        Raises CodeNotAllowed, NotFound, Conflict, Refused, NotRegistered; nothing of it remains then.
        """
        own = {key: value for key, value in (given or {}).items() if key in NODE_PARAMETERS}
        return await self._register(DesiredWorkflow(source=url, digest="", given=own), name, replace_it=False)

    async def bring(self, name: str, entry: DesiredWorkflow) -> None:
        """Loads an entry of the state file in place of the workflow of its name. Raises as `register`."""
        if name not in self.desired_workflows():
            self._expected.add(name)
        try:
            await self._register(entry, name, replace_it=True)
        finally:
            self._expected.discard(name)

    async def _register(self, entry: DesiredWorkflow, name: str, *, replace_it: bool) -> Workflow:
        path = await self._path(entry)
        try:
            return await self._register_at(path, entry, name, replace_it=replace_it)
        except BaseException:
            if not entry.digest:  # not one of the state file
                forget(self._store, entry.source)
            raise

    async def _register_at(self, path: Path, entry: DesiredWorkflow, name: str, *, replace_it: bool) -> Workflow:
        place = await self._in_thread(partial(TemporaryFolder, "archive"))
        try:
            found: War = await self._in_thread(partial(_unpack, path, place.path, entry.digest))
            self._check(ResolvedSource(path=path), found.digest)
            name = check_name("workflow", name or found.name)
            async with self._locks.setdefault(name, asyncio.Lock()):
                if name in self._served and not replace_it:
                    raise Conflict(f"Workflow {name} is already registered.")
                workflow = await self._start(name, found, entry, place)
                before = self._served.get(name)
                try:
                    self._replace(name, workflow)
                except BaseException:
                    await workflow.close()
                    raise
        except BaseException:
            place.remove()
            raise
        events.emit("workflow.ready", workflow=name, nodes=",".join(workflow.versions), digest=found.digest)
        if before is not None:
            await before.retire()
        return workflow

    async def _path(self, entry: DesiredWorkflow) -> Path:
        """Raises CodeNotAllowed, NotFound, DownloadFailed, AlreadyStored."""
        url = entry.source
        if self._handlers is None:
            raise CodeNotAllowed(
                f"'{url[:128]}' is a workflow, whose handlers are code, and this server runs none",
                hint="start it with --allow-code if you trust what the store holds",
            )
        if self._store is None:
            raise NotStored("Workflow store has not been configured.")
        if entry.digest and (kept := find_download(self._store, url)) is not None:
            return kept
        try:
            if is_http(url) and self._download is not None:
                return await self._download(url, self._store)
            if "://" in url:
                raise NotAllowed(url)
            return self._store.find(url)
        except OutsideStore as error:
            raise NotStored(error.message) from error
        except NotInStore as error:
            raise NotStored(f"Workflow not found in workflow store: {url[:128]}") from error
        except NotFound as error:
            raise NotStored(error.message, hint=error.hint) from error

    async def _start(self, name: str, found: War, entry: DesiredWorkflow, place: TemporaryFolder) -> Workflow:
        """Starts all nodes. Raises NotRegistered; none remains then."""
        if found.spec.ignored:
            events.emit("workflow.ignored", workflow=name, keys=",".join(found.spec.ignored)[:500])
        tasks = {
            node.name: self._loop.create_task(self._start_node(name, node, found, entry)) for node in found.spec.nodes
        }
        try:
            await asyncio.wait(tasks.values())
            failures = {node: error for node, task in tasks.items() if (error := _failure(task)) is not None}
            for error in failures.values():
                if (fault := find_fault(error)) is not None:
                    raise fault from error
            if failures:
                raise NotRegistered(name, failures)
        except BaseException:
            for task in tasks.values():
                task.cancel()
            await asyncio.wait(tasks.values())
            ready = [task.result() for task in tasks.values() if not task.cancelled() and task.exception() is None]
            await asyncio.gather(*(version.close() for version in ready))
            raise
        versions = {node: task.result() for node, task in tasks.items()}
        digests = {node.name: versions[node.name].digest for node in found.spec.nodes if node.url}
        registered = DesiredWorkflow(source=entry.source, digest=found.digest, models=digests, given=entry.given)
        return Workflow(name=name, registered=registered, spec=found.spec, versions=versions, place=place)

    async def _start_node(self, workflow: str, node: Node, found: War, entry: DesiredWorkflow) -> HandlerVersion:
        """Raises RequestError."""
        from trueline.serve.handlers.version import HandlerVersion, StartOptions  # only where a workflow runs

        model = check_name("model", f"{workflow}__{node.name}")
        assert self._handlers is not None  # checked before anything was read
        usual = self._fleet.how.usual_of(model, "1.0") | {"minWorkers": 1, "maxBatchDelay": 50 if node.url else 0}
        try:
            if not node.url:
                handler = HandlerVersion(model=model, version="1.0", workflow=workflow, limits=self._handlers)
                manifest = archive.Manifest(model=model, version="1.0", handler=f"{found.handler}:{node.name}")
                function = Archive(folder=found.folder, manifest=manifest, config={}, digest=found.digest)
                await handler.begin_in(function, StartOptions(given=entry.given, usual=usual), self._loop)
                return handler
            stored = await self._find(_name_in_store(node.url))
            if not archive.is_archive(stored.path):
                raise Refused(f"'{node.url[:128]}' is no model archive; nodes of a workflow are archives or functions")
            version = check_name("version", (await self._in_thread(partial(archive.peek, stored.path))).version)
            handler = HandlerVersion(
                model=model, version=version, source=node.url, workflow=workflow, limits=self._handlers
            )
            options = StartOptions(given=entry.given | node.parameters, usual=usual)
            digest, check = entry.models.get(node.name), partial(self._check, stored)
            await handler.begin(stored.path, options, self._loop, self._in_thread, digest, check)
            return handler
        except TruelineError as error:
            if isinstance(error, RequestError):
                raise
            raise Refused(public_reason(error)) from error

    def _check(self, found: ResolvedSource, digest: str) -> None:
        """Raises Refused for an archive that no trusted key has signed."""
        try:
            found.check(self._fleet.how.trusted, digest)
        except BundleError as error:
            raise Refused(error.message, hint=error.hint) from error

    def _replace(self, name: str, new: Workflow | None) -> None:
        """Serves `new` as workflow `name`, or none, and writes that.

        Raises Conflict, StorageError; nothing changes then.
        """
        for model in (one.model for one in new.versions.values() if one.model in self._models.names()) if new else ():
            if self._models.find(model, self._models.default(model)).workflow != name:
                raise Conflict(f"model '{model}' is served already, and a node of workflow {name} has this name")
        before, missing = self._served.get(name), self._missing.pop(name, None)
        self._exchange(before, new)
        try:
            self._keeper.keep(self.desired_workflows())
        except TruelineError:
            self._exchange(new, before)
            if missing is not None:
                self._missing[name] = missing
            raise

    def _exchange(self, old: Workflow | None, new: Workflow | None) -> None:
        for one in old.versions.values() if old is not None else ():
            self._models.remove(one.model, one.version)
        for one in new.versions.values() if new is not None else ():
            self._models.show(one)
        if old is not None:
            del self._served[old.name]
        if new is not None:
            self._served[new.name] = new

    async def unregister(self, name: str) -> None:
        """Ends a workflow and its nodes after their last requests. Raises UnknownWorkflow."""
        if name not in self.desired_workflows() and not self.busy(name):
            raise UnknownWorkflow(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            found = self._served.get(name)
            if name not in self.desired_workflows():
                raise UnknownWorkflow(name)
            self._replace(name, None)
            if found is not None:
                await found.retire()
                forget(self._store, found.registered.source)
            events.emit("workflow.retired", workflow=name)

    async def restore(self, state: DesiredState) -> list[str]:
        """Registers the workflows of the file; returns a line for each that fails, which stays desired."""
        failures = []
        self._expected |= state.workflows.keys() - self.desired_workflows().keys()
        for name, entry in state.workflows.items():
            with self._keeper.following(name, self.desired_workflows):
                try:
                    await self.bring(name, entry)
                except Exception as error:  # noqa: BLE001 - blind on purpose: one workflow fails, never the server
                    failures.append(f"workflow {name}: {self._note_failure(name, entry, error)}")
        return failures

    def _note_failure(self, name: str, entry: DesiredWorkflow, error: Exception) -> str:
        """Shows clients why a desired workflow is not served, without a path; returns the whole reason."""
        fault = find_fault(error)
        known = error if isinstance(error, RequestError) else fault
        why = "its archive is not available" if known is None else known.message
        self._missing[name] = _Missing(registered=entry, why=why, passing=fault is not None)
        self._expected.discard(name)
        return str(error) or type(error).__name__

    async def follow(self, state: DesiredState) -> bool:
        """Brings the server to the file's workflows, also those that failed for a reason that may pass; failures become
        events. False: call it again.
        """
        settled = True
        for name in {**state.workflows, **self.desired_workflows()}:
            want, have = state.workflows.get(name), self.desired_workflows().get(name)
            passing = name in self._missing and self._missing[name].passing
            if self.busy(name):
                settled = False  # the operation may make the two equal
            elif want != have or passing:
                with self._keeper.following(name, self.desired_workflows):
                    try:
                        await (self.unregister(name) if want is None else self.bring(name, want))
                    except Exception as error:  # noqa: BLE001 - blind on purpose: one workflow, never the server
                        if want is not None and name not in self._served:
                            self._note_failure(name, want, error)
                        events.emit("state.not_followed", workflow=name, why=str(error))
                    else:
                        events.emit("state.followed", workflow=name, served=want is not None)
        return settled

    async def close(self) -> None:
        """Ends the processes of all nodes."""
        await asyncio.gather(*(one.close() for one in self._served.values()))


def _unpack(path: Path, into: Path, digest: str) -> War:
    """Blocks. Raises Refused."""
    from trueline.torchserve.workflows import archive as war

    try:
        found = war.unpack(path, into)
        if digest and digest != found.digest:
            raise ArchiveError(
                f"the archive's digest is {found.digest[:12]}, the one that was registered had {digest[:12]}",
                hint="the archive was replaced; register it again",
            )
    except ArchiveError as error:
        raise Refused(error.message, hint=error.hint) from error
    return found


def _name_in_store(url: str) -> str:
    """The store's entry for a model's URL. Nothing is downloaded: the file has to be in the store, where TorchServe
    put it too.
    """
    remote = url.startswith(("http://", "https://", "file://"))
    return url.partition("?")[0].rsplit("/", 1)[-1] if remote else url


def _failure(task: asyncio.Task[Any]) -> Exception | None:
    """The error of a node. Raises every other error: faults of the server, and its end."""
    error = task.exception()
    if error is None or isinstance(error, TruelineError):
        return error
    raise error
