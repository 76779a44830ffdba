"""Loads, replaces and retires versions without losing a request; the only writer of Models.

A new version is made ready beside the old one, then takes its name; the old one retires after its last answer.
Operations on one model wait for each other. Each writes the desired state, and is undone if that fails.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trueline import events
from trueline.errors import RequestError, TruelineError
from trueline.serve import host
from trueline.serve.faults import find_fault
from trueline.serve.models.catalog import Models
from trueline.serve.models.desired_state import DesiredModel, DesiredState, DesiredVersion, Keeper
from trueline.serve.models.loader import Loader, Refused, ResolvedSource, VersionOptions, public_reason
from trueline.serve.models.servable import Servable
from trueline.serve.models.split import Split
from trueline.serve.models.version import BundleLoader


class Conflict(RequestError):
    """The operation conflicts with what is served."""

    code = "conflict"
    status = 409


class Fleet:
    """All methods are called on the loop."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        *,
        how: VersionOptions | None = None,
        state: Path | None = None,
        loaders: Sequence[Loader[Any]] = (),
        strict: bool = False,
    ) -> None:
        """`how`: the defaults of all versions; `in_thread` runs what blocks; `state`: the state file;
        `loaders` come before the one for bundles; `strict`: a version without workers may become the default, as in
        TorchServe.
        """
        self.models = models
        self.how = how or VersionOptions()
        self._loop, self._in_thread, self._strict = loop, in_thread, strict
        self._keeper = Keeper(state, "models")
        self._loaders = (*loaders, BundleLoader(self.how, loop, in_thread))
        self._locks: dict[str, asyncio.Lock] = {}
        self._desired: dict[Servable, DesiredVersion] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def lock(self, model: str) -> AbstractAsyncContextManager[None]:
        """Hold it during an operation of several steps on the model."""
        return self._locks.setdefault(model, asyncio.Lock())

    def busy(self, model: str) -> bool:
        return model in self._locks and self._locks[model].locked()

    async def load(
        self,
        found: ResolvedSource,
        model: str,
        version: str,
        *,
        source: str,
        how: VersionOptions | None = None,
        replace_it: bool = False,
        digest: str | None = None,
    ) -> Servable:
        """Makes a version ready and serves it, with `replace_it` in place of one of the same name.

        Raises Conflict for an existing name without `replace_it`, and for one that would be replaced by a version
        without workers; Refused if it cannot be served, ServerFault if the server cannot load it now. An older version
        then stays.
        """
        self._check_free(model)
        loader = next(one for one in self._loaders if one.accepts(found.path))
        made: Servable = loader.create(found, model, version, source)
        made.optional = how is not None and how.workers == 0
        fresh = self.models.get(model, version) is None
        if fresh:
            self.models.show(made)  # at once: its requests are "loading" while another operation holds the lock
        try:
            async with self.lock(model):
                before = None if fresh else self.models.get(model, version)
                if before is not None and before.state == "ready" and not replace_it:
                    raise Conflict(f"Model version {version} is already registered for model {model}")
                self._check_free(model)
                events.emit("version.loading", model=model, version=version)
                await self._load_over(before, made, loader.load(made, found, how, digest), idle=made.optional)
        except BaseException:
            if fresh and self.models.get(model, version) is made:
                self.models.remove(model, version)
            raise
        return made

    async def _load_over(
        self, before: Servable | None, made: Servable, work: Awaitable[DesiredVersion], *, idle: bool
    ) -> None:
        """Loads `made` and serves it in place of `before`, which stays if that fails; `idle`: also if `before` has
        workers and `made` has none.
        """
        began = time.perf_counter()
        try:
            self._desired[made] = await work
            made.load_s = time.perf_counter() - began
            if before is not None and not before.obstacle and not idle:
                self._check_workers(made)
            if before is not None and made.obstacle:
                made.optional = before.optional
            self.models.show(made)
            self._keep()
        except BaseException as error:
            self._desired.pop(made, None)
            if made.handler is not None and made.state == "ready":
                self._retire(made)
            if before is not None:
                self.models.show(before)
            shown = self._load_error(made, error)
            if shown is not None:
                raise shown from error
            raise
        events.emit("version.ready", model=made.model, version=made.version, digest=made.digest)
        if before is not None and before.state == "ready":
            self._retire(before)
        elif before is not None:
            self._desired.pop(before, None)

    def _load_error(self, made: Servable, error: BaseException) -> RequestError | None:
        """What the caller of a failed load gets instead of `error`, without a path; None: `error` itself."""
        fault = find_fault(error)
        if fault is None and (isinstance(error, RequestError) or not isinstance(error, TruelineError)):
            return None
        reason = public_reason(error) if isinstance(error, TruelineError) and fault is None else str(fault)
        events.emit("version.failed", model=made.model, version=made.version, why=reason)
        return fault or Refused(f"model '{made.model}' version '{made.version}' is not served: {reason}")

    def _check_free(self, model: str) -> None:
        """Raises Conflict for a node of a workflow, which only the workflow changes."""
        owners = [one.workflow for one in self.models.all() if one.model == model and one.workflow]
        if owners:
            raise Conflict(
                f"model '{model}' is a node of workflow '{owners[0]}'",
                hint=f"unregister the workflow (DELETE /workflows/{owners[0]}) and register the workflow again",
            )

    def _check_workers(self, version: Servable) -> None:
        """Raises Conflict for a version that would take requests and has no worker to answer them."""
        if version.state == "ready" and not version.policy.lanes:
            model, name = version.model, version.version
            raise Conflict(
                f"version {name} of model {model} has no worker: its requests would fail",
                hint=f"start one first (PUT /models/{model}/{name}?min_worker=1&synchronous=true), or register it with "
                "initial_workers=1",
            )

    def _check_successor(self, model: str, version: str) -> None:
        """Raises Conflict if requests that `version` answers would go to the default version, which cannot answer."""
        split, default = self.models.split(model), self.models.find(model, self.models.default(model))
        favoured = split is not None and split.weights.get(version) and not self.models.obstacle(model, version)
        if favoured and default.obstacle:
            raise Conflict(
                f"requests of version {version} of model {model} would go to version {default.version}, which cannot "
                f"answer them: {default.obstacle}",
                hint=f"scale it first (PUT /models/{model}/{default.version}?min_worker=1&synchronous=true), or make "
                "another version the default",
            )

    async def make_default(self, model: str, version: str) -> None:
        """`set_default`, once a worker of the version can answer. Raises NotStarted, too."""
        await self.wait_able(model, version)
        self.set_default(model, version)

    async def wait_able(self, model: str, version: str) -> None:
        """Returns when a worker of the version can answer, or it has none. Raises NotFound, NotReady, NotStarted."""
        found = self.models.find(model, version)
        found.check_ready()
        if found.obstacle and found.handler is not None:
            await found.handler.wait_ready()

    def set_default(self, model: str, version: str) -> None:
        """Raises NotFound, NotReady, Conflict (also for a version without workers, unless the server is strict)."""
        if not self._strict and (self.models.split(model) is not None or self.models.default(model) != version):
            self._check_workers(self.models.find(model, version))
        self._redirect(model, lambda: self.models.set_default(model, version))
        events.emit("default.set", model=model, version=version)

    def set_split(self, model: str, weights: Mapping[str, float]) -> None:
        """Raises NotFound, NotReady, RequestError, Conflict (also for a share of a version without workers)."""
        split = Split(dict(weights))
        for version in [name for name, weight in split.weights.items() if weight]:
            self._check_workers(self.models.find(model, version))
        self._redirect(model, lambda: self.models.set_split(model, split))
        shares = ", ".join(f"{version}: {weight:g}" for version, weight in weights.items())
        events.emit("split.set", model=model, weights=shares)

    def _redirect(self, model: str, act: Callable[[], None]) -> None:
        """Undoes `act` if the state file cannot be written."""
        self._check_free(model)
        before = self.models.default(model), self.models.split(model)
        act()
        try:
            self._keep()
        except TruelineError:
            self.models.restore(model, *before)
            raise

    def scale(self, model: str, version: str, workers: int) -> int:
        """Sets a version's runs or workers and returns their number. Raises NotFound, NotReady, Conflict."""
        self._check_free(model)
        found = self.models.find(model, version)
        before = found.policy.lanes
        found.scale(workers)
        kept = self._desired.get(found)
        try:
            if kept is not None:
                self._desired[found] = msgspec.structs.replace(kept, workers=found.policy.lanes)
            self._keep()
        except TruelineError:
            found.scale(before)
            if kept is not None:
                self._desired[found] = kept
            raise
        return found.policy.lanes

    async def retire(self, model: str, version: str | None = None) -> None:
        """Removes a version, or the model with all its versions; returns when their last requests are answered.

        Raises NotFound, Conflict; RequestError (403) for the default version while there are others.
        """
        async with self.lock(model):
            self._check_free(model)
            names = self.models.versions(model) if version is None else [version]
            others = len(self.models.versions(model)) > 1
            if version is not None and others and self.models.default(model) == version:
                raise _DefaultVersion(
                    f"Cannot remove default version for model {model}",
                    hint="set another default version first, or remove the others",
                )
            default, split = self.models.default(model), self.models.split(model)
            if version is not None and others and not self._strict:
                self._check_successor(model, version)
            gone = [self.models.remove(model, name) for name in names]
            kept = {one: self._desired.pop(one) for one in gone if one in self._desired}
            try:
                self._keep()
            except TruelineError:
                self._desired.update(kept)
                for one in gone:
                    self.models.show(one)
                self.models.restore(model, default, split)
                raise
            await asyncio.gather(*(self._retire(one) for one in gone))

    def _retire(self, version: Servable) -> asyncio.Task[None]:
        async def work() -> None:
            await version.retire()
            self._desired.pop(version, None)
            await self._in_thread(host.give_back)
            events.emit("version.retired", model=version.model, version=version.version)

        task = self._loop.create_task(work())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def close(self) -> None:
        """Ends the handlers' processes."""
        handlers = [one.handler for one in self.models.all() if one.handler is not None]
        await asyncio.gather(*(one.close() for one in handlers))

    def desired_state(self) -> DesiredState:
        """What is served, in the form of the state file."""
        found: dict[str, DesiredModel] = {}
        for model in self.models.names():
            split = self.models.split(model)
            versions = {}
            for name in self.models.versions(model):
                kept = self._desired.get(self.models.find(model, name))
                if kept is not None:
                    versions[name] = kept
            default = self.models.default(model)
            if default in versions:
                weights = dict(split.weights) if split is not None else {}
                found[model] = DesiredModel(versions=versions, default=default, split=weights)
        return DesiredState(models=found)

    def _keep(self) -> None:
        self._keeper.keep(self.desired_state().models)

    def following(self, model: str) -> AbstractContextManager[None]:
        """While the model is changed to what the state file says, the file is not written for it."""
        return self._keeper.following(model, lambda: self.desired_state().models)

    def how_of(self, desired: DesiredVersion) -> VersionOptions:
        return replace(
            self.how,
            workers=desired.workers,
            max_batch=desired.max_batch or self.how.max_batch,
            max_delay_s=self.how.max_delay_s if desired.max_delay_s is None else desired.max_delay_s,
            given=desired.given | {"initial_workers": str(desired.workers)},
        )

    async def restore(self, state: DesiredState, find: Callable[[str], Awaitable[ResolvedSource]]) -> list[str]:
        """Loads what the state file lists; returns messages for what could not be loaded, which stays desired."""
        missing: list[str] = []
        self.expect_all(state)
        for name, model in state.models.items():
            with self.following(name):
                missing += await self._restore(name, model, find)
        return missing

    async def _restore(
        self, name: str, model: DesiredModel, find: Callable[[str], Awaitable[ResolvedSource]]
    ) -> list[str]:
        missing: list[str] = []
        for version in sorted(model.versions, key=lambda version: version != model.default):
            desired = model.versions[version]
            how = self.how_of(desired)
            try:
                found = await find(desired.source)
                await self.load(found, name, version, source=desired.source, how=how, digest=desired.digest)
            except Exception as error:  # noqa: BLE001 - blind on purpose: one version fails, never the server
                missing.append(f"{name} version {version}: {self.note_failure(name, version, error)}")
                if (failed := self.models.get(name, version)) is not None:
                    self._desired[failed] = desired
        if model.split:
            try:
                self._redirect(name, lambda: self.models.set_split(name, Split(dict(model.split))))
            except RequestError as error:
                missing.append(f"the split of {name}: {error.message}")
        return missing

    async def retry(self, find: Callable[[str], Awaitable[ResolvedSource]]) -> list[str]:
        """Loads again what failed for a reason that may pass; returns the models that have changed."""
        changed = []
        for one in [found for found in self.models.all() if found.state == "failed" and found.passing]:
            desired, (name, version) = self._desired.get(one), (one.model, one.version)
            how, digest = (None, None) if desired is None else (self.how_of(desired), desired.digest)
            try:
                with self.following(name) if desired is not None else nullcontext():
                    found = await find(one.source)
                    await self.load(found, name, version, source=one.source, how=how, digest=digest)
            except Exception as error:  # noqa: BLE001 - blind on purpose: one version fails, never the others
                if self.models.get(name, version) is one:
                    self.note_failure(name, version, error)
                continue
            changed.append(name)
            if self.models.obstacle(name) and not self.models.obstacle(name, version):
                self.set_default(name, version)
        return changed

    def expect_all(self, state: DesiredState) -> None:
        """`expect` for what the state file lists; the default of a model comes first."""
        for name, model in state.models.items():
            for version in sorted(model.versions, key=lambda version: version != model.default):
                wish = model.versions[version]
                self.expect(name, version, wish.source, optional=not wish.workers)

    def expect(self, model: str, version: str, source: str, *, optional: bool) -> None:
        """Shows a version that will be loaded: until then its requests are answered with 503 and Retry-After."""
        if self.models.get(model, version) is None:
            made = self.models.add(model, version)
            made.source, made.optional = source, optional

    def note_failure(self, model: str, version: str, error: Exception) -> str:
        """Shows why an expected version is not served, to clients without a path; returns the whole reason."""
        found = self.models.get(model, version)
        if found is None:
            found = self.models.add(model, version)
        known = error if isinstance(error, RequestError) else find_fault(error)
        unloaded = f"model '{model}' version '{version}' is not served: "
        reason = "the server failed to load it; its log says why"
        if known is not None:
            reason = known.message.removeprefix(unloaded)
        if isinstance(error, TruelineError) and known is None:
            reason = "its bundle is not available"
        if found.state != "ready":  # else an older one stays
            found.state, found.reason = "failed", reason
            found.passing = find_fault(error) is not None
            events.emit("version.unavailable", model=model, version=version, why=str(error))
        return str(error) or type(error).__name__


class _DefaultVersion(RequestError):
    """TorchServe answers 403 for it."""

    code = "default_version"
    status = 403
