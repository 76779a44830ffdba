"""The models and versions of a server, and which version a request goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trueline import events
from trueline.errors import NotFound, NotReady, RequestError, join_names
from trueline.runtime.compare import compare
from trueline.serve.models.servable import LOADING_S, Servable
from trueline.serve.models.split import Split
from trueline.serve.models.version import ProgramVersion

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


class StillLoading(NotReady):
    """The server has not found yet what it is to serve."""

    def __init__(self, model: str) -> None:
        why = "the server is still loading, and it may be among its models"
        super().__init__(f"model '{model[:64]}' is not served yet: {why}", retry_after_s=LOADING_S)


class UnknownModel(NotFound):
    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(f"model '{model[:64]}' is not served here (serving: {join_names(names)})")
        self.model = model[:64]


class UnknownVersion(NotFound):
    def __init__(self, model: str, version: str, versions: list[str]) -> None:
        super().__init__(f"model '{model}' has no version '{version[:64]}' (has: {join_names(versions)})")
        self.model = model
        self.version = version[:64]


@dataclass(slots=True)
class Shadow:
    """A version that gets copies of answered requests; its answers are compared and dropped.

    Clients do not wait for it. A copy is skipped when the shadow's queue is more than half full.
    """

    version: Servable
    asked: int = 0
    left_out: int = 0
    failed: int = 0
    agreed: int = 0
    differed: int = 0
    records: int = 0
    changed: int = 0
    """Decisions that are others: the largest element of a row, a whole number, a text; of `records` compared."""
    max_abs_error: float = 0.0
    first_difference: str = ""
    _pending: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)

    def show(self, inputs: dict[str, Any], answer: Mapping[str, Array]) -> None:
        """Sends `inputs` to the shadow and compares its answer when it comes. Never raises."""
        try:
            if self.version.num_waiting > self.version.policy.max_requests // 2:
                self.left_out += 1
                return
            self.asked += 1
            found = self.version.ask(inputs)
        except Exception as error:  # noqa: BLE001 - blind on purpose: it must not fail a request
            self._count_failure(error)
            return
        if isinstance(found, dict):
            self._compare(answer, found)
            return
        self._pending.add(found)
        found.add_done_callback(lambda done: self._finish(answer, done))

    def _finish(self, answer: Mapping[str, Array], done: asyncio.Future[dict[str, Array]]) -> None:
        self._pending.discard(done)
        if done.cancelled():
            return
        failure = done.exception()
        if failure is not None:
            self._count_failure(failure)
        else:
            self._compare(answer, done.result())

    def _count_failure(self, error: BaseException) -> None:
        self.failed += 1
        if self.failed == 1:
            why = error.message if isinstance(error, RequestError) else type(error).__name__
            events.emit("shadow.failed", model=self.version.model, version=self.version.version, why=why)

    def _compare(self, answer: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        one = compare(answer, found)
        self.max_abs_error = max(self.max_abs_error, one.max_abs_error)
        self.records += max((len(array) for array in answer.values() if array.ndim), default=1)
        self.changed += one.decisions_changed
        if one.agrees:
            self.agreed += 1
            return
        self.differed += 1
        if not self.first_difference:
            self.first_difference = one.reason
            events.emit("shadow.differed", model=self.version.model, version=self.version.version, why=one.reason)

    def facts(self) -> dict[str, Any]:
        return {
            "version": self.version.version,
            "asked": self.asked,
            "agreed": self.agreed,
            "differed": self.differed,
            "failed": self.failed,
            "leftOut": self.left_out,
            "records": self.records,
            "decisionsChanged": self.changed,
            "maxAbsError": self.max_abs_error,
            "firstDifference": self.first_difference,
        }


class Models:
    """All versions by model. The first version of a model is its default until another is set."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, Servable]] = {}
        self._defaults: dict[str, str] = {}
        self._splits: dict[str, Split] = {}
        self.changes = 0  # grows when a request may go to another version than before
        self.shadows: dict[str, Shadow] = {}  # by model: versions that get copies of its requests
        self.started = False
        """Whether everything requested at start is loaded. From then on the server stays ready while further models
        load, and when nothing is served.
        """
        self.locating = False
        """Whether names of what is loaded at start are not known yet; an unknown model may be one of them."""

    def add(self, model: str, version: str) -> ProgramVersion:
        made = ProgramVersion(model=model, version=version)
        self.show(made)
        return made

    def show(self, version: Servable) -> Servable | None:
        """Serves `version` under its name; returns the one that had it."""
        versions = self._versions.setdefault(version.model, {})
        before = versions.get(version.version)
        versions[version.version] = version
        self.changes += 1
        version.at_start = not self.started
        self._defaults.setdefault(version.model, version.version)
        return before

    def remove(self, model: str, version: str) -> Servable:
        """Removes a version, and the model with its last one. Raises UnknownModel, UnknownVersion."""
        found = self.find(model, version)
        del self._versions[model][version]
        self.changes += 1
        split = self._splits.get(model)
        if split is not None and version in split.weights:
            del self._splits[model]
        if model in self.shadows and self.shadows[model].version is found:
            del self.shadows[model]
        if not self._versions[model]:
            del self._versions[model], self._defaults[model]
        elif self._defaults[model] == version:
            self._defaults[model] = next(iter(self._versions[model]))
        return found

    def find(self, model: str, version: str | None = None, key: str = "") -> Servable:
        """The version; without `version` the split chooses one, else it is the default. Requests with the same `key` go
        to the same version. Raises UnknownModel, UnknownVersion, StillLoading.
        """
        versions = self._versions.get(model)
        if versions is None:
            raise StillLoading(model) if self.locating else UnknownModel(model, list(self._versions))
        if version is None:
            split = self._splits.get(model)
            version = self._defaults[model] if split is None else split.choose(key)
        found = versions.get(version)
        if found is None:
            raise UnknownVersion(model, version, list(versions))
        return found

    def get(self, model: str, version: str) -> Servable | None:
        return self._versions.get(model, {}).get(version)

    def leads_to(self, found: object, model: str, version: str | None) -> bool:
        """Whether all requests for `version` of `model`, or for no version, go to `found`."""
        if version is None and model in self._splits:
            return False
        return self.get(model, version or self._defaults.get(model, "")) is found

    def default(self, model: str) -> str:
        self.find(model)
        return self._defaults[model]

    def set_default(self, model: str, version: str) -> None:
        """Ends a split, too. Raises UnknownModel, UnknownVersion, NotReady."""
        self.find(model, version).check_ready()
        self._defaults[model] = version
        self._splits.pop(model, None)
        self.changes += 1

    def split(self, model: str) -> Split | None:
        return self._splits.get(model)

    def set_split(self, model: str, split: Split) -> None:
        """Raises UnknownModel, UnknownVersion, NotReady."""
        for version in split.weights:
            self.find(model, version).check_ready()
        self._splits[model] = split
        self.changes += 1

    def restore(self, model: str, default: str, split: Split | None) -> None:
        self.changes += 1
        self._defaults[model] = default
        self._splits.pop(model, None)
        if split is not None:
            self._splits[model] = split

    def names(self) -> list[str]:
        return list(self._versions)

    def versions(self, model: str) -> list[str]:
        self.find(model)
        return list(self._versions[model])

    def of(self, model: str) -> list[Servable]:
        """The versions of a model; none for an unknown one."""
        return list(self._versions.get(model, {}).values())

    def all(self) -> list[Servable]:
        """Safe in the thread of a scrape, while versions are added and removed."""
        return [version for versions in list(self._versions.values()) for version in list(versions.values())]

    def targets(self, model: str, version: str | None = None) -> list[Servable]:
        """Where requests for `version` of `model` go; without `version` to the default, or to several of a split."""
        split = self._splits.get(model) if version is None else None
        weights = {} if split is None else split.weights
        names = [name for name, weight in weights.items() if weight] or [version or self._defaults.get(model, "")]
        return [one for name in names if (one := self.get(model, name)) is not None]

    def obstacle(self, model: str, version: str | None = None) -> str:
        """Why a request would not be answered now; empty if it would. Raises UnknownModel, UnknownVersion."""
        self.find(model, version)
        return next((one.obstacle for one in self.targets(model, version) if one.obstacle), "")

    @property
    def ready(self) -> bool:
        """Whether requests to every model would be answered now.

        Once the server has started, a version that loads does not count, nor one that is `optional` while another model
        answers: registered without workers, or a damaged bundle among those of a store.
        """
        if self.locating:
            return False
        found = [one for model in list(self._defaults) for one in self.targets(model)]  # safe in a scrape's thread
        if not self.started:
            return bool(found) and not any(one.obstacle for one in found)
        settled = [one for one in found if one.state != "loading"]
        if any(one.obstacle and not one.optional for one in settled):
            return False
        return not settled or not all(one.obstacle for one in settled)
