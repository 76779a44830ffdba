"""The one writer of what is served: versions come, take over and leave without a request lost.

    load      a new version is made ready beside the old one: digests checked, golden examples answered, measured
    show      it takes the place of an older one of its name, or stands beside the others
    retire    what nobody is sent to any more ends with its last request

Acts on one model wait for each other; those on others do not. After each the wanted state is written; an act whose
outcome cannot be written is undone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trueline import events
from trueline.bundle import signing
from trueline.bundle.read import open_bundle
from trueline.bundle.signing import Trusted
from trueline.errors import NotReady, RequestError, TruelineError
from trueline.serve import host
from trueline.serve.batching.policy import Policy
from trueline.serve.handlers import archive
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.handlers.worker import Limits
from trueline.serve.models import desired_state as wanted
from trueline.serve.models.catalog import Models
from trueline.serve.models.desired_state import Wanted, WantedModel, WantedVersion
from trueline.serve.models.loader import Way, load
from trueline.serve.models.split import Split
from trueline.serve.models.version import MAX_LANES, Loaded, Version
from trueline.serve.redaction import public_reason


class Conflict(RequestError):
    """The act does not fit what is there."""

    code = "conflict"
    status = 409


class Refused(RequestError):
    """The version cannot be served; the reason names no path."""

    code = "refused"
    status = 400


class CodeNotAllowed(RequestError):
    """An archive brings code of its own, and the operator did not allow any."""

    code = "code_not_allowed"
    status = 403
    torchserve_type = "ModelException"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a source's bundle lies, and what the registry says about it."""

    path: Path
    name: str | None = None
    version: str | None = None
    digest: str | None = None
    signature: str | None = None
    """What vouches for it; None: what lies beside it, if anything does."""

    def check(self, trusted: Trusted | None, digest: str) -> None:
        """Raises BundleError unless a trusted key has signed what is here, and has `digest`."""
        if trusted is not None:
            trusted.check(f"'{self.path.name}'", digest, self.signature or signing.beside(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a version is to be run, where nothing else is said for it."""

    way: Way = field(default_factory=Way)
    max_batch: int = 64
    max_delay_s: float | None = None
    """How long an idle model waits for company; None: as is learned to pay."""
    max_queue: int = 256
    workers: int | None = None
    """Runs at the same time; None: as was measured to be right. 0: none, requests are refused."""
    shared: bool = False
    """Whether other processes answer on the same ports."""
    trusted: Trusted | None = None
    """Whose signatures are asked for; None: nobody's. Of the server: what a single version says does not count."""
    usual: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What versions have that say nothing of it, in model-config.yaml's words: by `MODEL/VERSION`, or under an empty
    name for every archive."""
    given: Mapping[str, str] = field(default_factory=lambda: {"default_workers": "1"})
    """What an archive's workers are to be like where its own configuration says otherwise, in TorchServe's words."""

    def usual_of(self, model: str, version: str) -> dict[str, Any]:
        """What an archive's own configuration goes before."""
        return {**self.usual.get("", {}), **self.usual.get(f"{model}/{version}", {})}

    def of_bundle(self, model: str, version: str) -> How:
        """The same for a bundle: batch, delay and workers are what is read. Raises Refused."""
        own = self.usual.get(f"{model}/{version}", {})
        try:
            found = msgspec.convert({key: own[key] for key in _OF_BUNDLES if key in own}, _OfBundle)
        except msgspec.ValidationError as error:
            raise Refused(f"what is said of model '{model}' version '{version}' cannot be: {error}") from error
        return replace(
            self,
            max_batch=found.batch_size or self.max_batch,
            max_delay_s=self.max_delay_s if found.max_batch_delay is None else found.max_batch_delay / 1e3,
            workers=self.workers if found.min_workers is None else found.min_workers,
        )


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _OfBundle(msgspec.Struct, frozen=True, rename="camel"):
    batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_batch_delay: _Count | None = None
    min_workers: _Count | None = None


_OF_BUNDLES = ("batchSize", "maxBatchDelay", "minWorkers")


class Fleet:
    """Loads, shows, splits, retires. All its methods are called on the loop."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        *,
        how: How | None = None,
        state: Path | None = None,
        handlers: Limits | None = None,
    ) -> None:
        """`how` is for what says nothing of its own; `in_thread` runs what blocks; `state` is the file of the wanted
        state, if it is to be kept; `handlers` bounds the processes of archives' code, None: none is run.
        """
        self.models = models
        self.how = how or How()
        self._loop = loop
        self._in_thread = in_thread
        self._keeper = wanted.Keeper(state, "models")
        self._handlers = handlers
        self._locks: dict[str, asyncio.Lock] = {}
        self._wanted: dict[Version, WantedVersion] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def lock(self, model: str) -> AbstractAsyncContextManager[None]:
        """Held by who acts on a model in several steps."""
        return self._locks.setdefault(model, asyncio.Lock())

    def busy(self, model: str) -> bool:
        """Whether an act on the model is under way."""
        return model in self._locks and self._locks[model].locked()

    async def load(
        self,
        found: Found,
        model: str,
        version: str,
        *,
        source: str,
        how: How | None = None,
        replace_it: bool = False,
        digest: str | None = None,
    ) -> Version:
        """Makes a version ready and shows it. With `replace_it` it takes the place of one of the same name.

        Raises Conflict when there is one and `replace_it` is not set, Refused when it cannot be served; what was there
        goes on as it was.
        """
        async with self.lock(model):
            self._check_free(model)
            before = self._at(model, version)
            if before is not None and before.state == "ready" and not replace_it:
                raise Conflict(f"Model version {version} is already registered for model {model}")
            made = self._new(found, model, version, source)
            fresh = before is None
            if fresh:
                self.models.put(made)
            events.emit("version.loading", model=model, version=version)
            began = time.perf_counter()
            try:
                if isinstance(made, HandlerVersion):
                    self._wanted[made] = await self._start(made, found, how or self.how, digest)
                else:
                    chosen = how or self.how.of_bundle(model, version)
                    self._wanted[made] = await self._prove(made, found, chosen, digest)
                made.load_s = time.perf_counter() - began
                self.models.put(made)
                self._keep()
            except BaseException as error:
                self._wanted.pop(made, None)
                if isinstance(made, HandlerVersion) and made.state == "ready":
                    self._retire(made)
                if fresh:
                    self.models.remove(model, version)
                elif before is not None:
                    self.models.put(before)
                if isinstance(error, TruelineError) and not isinstance(error, RequestError):
                    reason = public_reason(error)
                    events.emit("version.failed", model=model, version=version, why=reason)
                    raise Refused(f"model '{model}' version '{version}' is not served: {reason}") from error
                raise
            events.emit("version.ready", model=model, version=version, digest=made.digest)
            if before is not None:
                self._retire(before)
            return made

    def _new(self, found: Found, model: str, version: str, source: str) -> Version:
        """Raises CodeNotAllowed."""
        if not archive.is_archive(found.path):
            return Version(model=model, version=version, source=source)
        if self._handlers is None:
            raise CodeNotAllowed(
                f"'{found.path.name[:128]}' is a model archive whose handler is code, and this server runs none",
                hint="start it with --allow-code if you trust what the store holds",
            )
        return HandlerVersion(model=model, version=version, source=source, limits=self._handlers)

    async def _start(self, made: HandlerVersion, found: Found, how: How, digest: str | None) -> WantedVersion:
        """Makes an archive's handler ready. Raises ArchiveError, NotStarted."""
        usual = self.how.usual_of(made.model, made.version)
        kept = await made.begin(
            found.path,
            how.given,
            self._in_thread,
            self._loop,
            digest or found.digest,
            usual=usual,
            shared=self.how.shared,
            weights=self.how.way.shared,
            check=lambda found_digest: found.check(self.how.trusted, found_digest),
        )
        return WantedVersion(source=made.source, digest=kept, workers=made.policy.lanes, given=dict(how.given))

    async def _prove(self, made: Version, found: Found, how: How, digest: str | None) -> WantedVersion:
        """Makes a bundle's program ready. Raises BundleError, NotProven."""
        loaded: Loaded = await self._in_thread(lambda: _load(found, how, digest, self.how.trusted))
        self._open(made, loaded, how)
        return WantedVersion(
            source=made.source,
            digest=loaded.digest,
            workers=made.policy.lanes,
            max_batch=None if how.max_batch == self.how.max_batch else how.max_batch,
            max_delay_s=None if how.max_delay_s == self.how.max_delay_s else how.max_delay_s,
        )

    def _check_free(self, model: str) -> None:
        """Raises Conflict for a node of a workflow: it changes with that alone."""
        owners = [one.workflow for one in self.models.all() if one.model == model and one.workflow]
        if owners:
            raise Conflict(
                f"model '{model}' is a node of workflow '{owners[0]}'",
                hint=f"unregister the workflow (DELETE /workflows/{owners[0]}) and register it as it is to be",
            )

    def _at(self, model: str, version: str) -> Version | None:
        known = model in self.models.names() and version in self.models.versions(model)
        return self.models.find(model, version) if known else None

    def _open(self, version: Version, loaded: Loaded, how: How) -> None:
        lanes = how.workers if how.workers is not None else (1 if loaded.plan.batch else 2)
        policy = Policy(
            batch=loaded.plan.batch,
            max_batch=loaded.plan.max_batch,
            max_delay_s=how.max_delay_s,
            lanes=min(lanes, MAX_LANES),
            max_requests=how.max_queue,
        )
        version.make_ready(loaded, policy, ThreadPoolExecutor(MAX_LANES, thread_name_prefix="run"), self._loop)

    def set_default(self, model: str, version: str) -> None:
        """Requests without a version go to `version` from now on. Raises NotFound, NotReady, Conflict."""
        self._check_free(model)
        before = (self.models.default(model), self.models.split(model))
        self.models.set_default(model, version)
        try:
            self._keep()
        except TruelineError:
            self.models.restore(model, *before)
            raise
        events.emit("default.set", model=model, version=version)

    def set_split(self, model: str, weights: Mapping[str, float]) -> None:
        """Requests without a version go by weight. Raises NotFound, NotReady, Conflict, RequestError."""
        self._check_free(model)
        default, before = self.models.default(model), self.models.split(model)
        self.models.set_split(model, Split(dict(weights)))
        try:
            self._keep()
        except TruelineError:
            self.models.restore(model, default, before)
            raise
        events.emit(
            "split.set", model=model, weights=", ".join(f"{one}: {weight:g}" for one, weight in weights.items())
        )

    def scale(self, model: str, version: str, workers: int) -> int:
        """How many runs of a version go on at the same time. Returns how many it is now.

        Raises NotFound, NotReady, Conflict.
        """
        self._check_free(model)
        found = self.models.find(model, version)
        before = found.policy.lanes
        found.scale(workers)
        kept = self._wanted.get(found)
        try:
            if kept is not None:
                self._wanted[found] = msgspec.structs.replace(kept, workers=found.policy.lanes)
            self._keep()
        except TruelineError:
            found.scale(before)
            if kept is not None:
                self._wanted[found] = kept
            raise
        return found.policy.lanes

    async def retire(self, model: str, version: str | None = None) -> None:
        """Takes a version away, or the model with all its versions; returns when their last requests are answered.

        Raises NotFound, Conflict; RequestError (403) for the default version while there are others.
        """
        async with self.lock(model):
            self._check_free(model)
            names = self.models.versions(model) if version is None else [version]
            others = len(self.models.versions(model)) > 1
            if version is not None and others and self.models.default(model) == version:
                raise _DefaultVersion(f"Cannot remove default version for model {model}")
            default, split = self.models.default(model), self.models.split(model)
            gone = [self.models.remove(model, name) for name in names]
            kept = {one: self._wanted.pop(one) for one in gone if one in self._wanted}
            try:
                self._keep()
            except TruelineError:
                self._wanted.update(kept)
                for one in gone:
                    self.models.put(one)
                self.models.restore(model, default, split)
                raise
            await asyncio.gather(*(self._retire(one) for one in gone))

    def _retire(self, version: Version) -> asyncio.Task[None]:
        async def work() -> None:
            await version.retire()
            self._wanted.pop(version, None)
            await self._in_thread(host.give_back)
            events.emit("version.retired", model=version.model, version=version.version)

        task = self._loop.create_task(work())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def close(self) -> None:
        """Ends the processes of archives' handlers: the server leaves."""
        handled = [one for one in self.models.all() if isinstance(one, HandlerVersion)]
        await asyncio.gather(*(one.close() for one in handled))

    # the wanted state

    def wanted(self) -> Wanted:
        """What is served, as the state file says it."""
        found: dict[str, WantedModel] = {}
        for model in self.models.names():
            split = self.models.split(model)
            versions = {}
            for name in self.models.versions(model):
                kept = self._wanted.get(self.models.find(model, name))
                if kept is not None:
                    versions[name] = kept
            default = self.models.default(model)
            if default in versions:
                weights = dict(split.weights) if split is not None else {}
                found[model] = WantedModel(versions=versions, default=default, split=weights)
        return Wanted(models=found)

    def _keep(self) -> None:
        self._keeper.keep(self.wanted().models)

    def following(self, model: str) -> AbstractContextManager[None]:
        """While a model is brought to what the file says, the file is not written for it."""
        return self._keeper.following(model, lambda: self.wanted().models)

    def how_of(self, told: WantedVersion) -> How:
        """How a version of the file is to be run."""
        return replace(
            self.how,
            workers=told.workers,
            max_batch=told.max_batch or self.how.max_batch,
            max_delay_s=self.how.max_delay_s if told.max_delay_s is None else told.max_delay_s,
            given=told.given | {"initial_workers": str(told.workers)},
        )

    async def restore(self, state: Wanted, find: Callable[[str], Awaitable[Found]]) -> list[str]:
        """Loads what the file wants; returns what could not be had, in words. Those are wanted on."""
        missing: list[str] = []
        for name, model in state.models.items():
            with self.following(name):
                missing += await self._restore(name, model, find)
        return missing

    async def _restore(self, name: str, model: WantedModel, find: Callable[[str], Awaitable[Found]]) -> list[str]:
        missing: list[str] = []
        for version in sorted(model.versions, key=lambda version: version != model.default):
            told = model.versions[version]
            how = self.how_of(told)
            try:
                found = await find(told.source)
                await self.load(found, name, version, source=told.source, how=how, digest=told.digest)
            except TruelineError as error:
                missing.append(f"{name} version {version}: {error.message}")
                failed = self.models.add(name, version)
                failed.source = told.source
                failed.fail(error.message if isinstance(error, RequestError) else "the bundle cannot be had")
                self._wanted[failed] = told
        if model.split:
            try:
                self.set_split(name, model.split)
            except NotReady as error:
                missing.append(f"the split of {name}: {error.message}")
        return missing


class _DefaultVersion(RequestError):
    """TorchServe answers 403 for it."""

    code = "default_version"
    status = 403


def _load(found: Found, how: How, digest: str | None, trusted: Trusted | None) -> Loaded:
    """Opens, verifies, replays and measures. Blocks. Raises BundleError, NotProven."""
    bundle = open_bundle(found.path)
    found.check(trusted, bundle.digest)
    loaded = load(bundle, how.way, max_batch=how.max_batch, digest=digest or found.digest)
    if how.max_delay_s:  # the operator wants requests to wait for company
        return replace(loaded, plan=replace(loaded.plan, inline_values=0))
    return loaded
