"""Canaries and shadows: new versions that are tried on real requests.

A canary gets a share of the requests and is rolled back when it fails, is slow or, as its rule says, answers otherwise;
a shadow gets copies, and its answers are only compared. Both end when their version is retired.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from trueline import events
from trueline.errors import NotFound, RequestError, TruelineError
from trueline.serve.models.catalog import Shadow
from trueline.serve.models.controller import Conflict, Fleet
from trueline.serve.models.servable import Servable
from trueline.serve.traffic.canary import CanaryRule, CanaryVerdict, Disagreement, Sample, judge, sample

TICK_S = 0.2  # between checks of canaries


@dataclass(slots=True, kw_only=True)
class Canary:
    """One canary; it is kept when it is over."""

    model: str
    version: Servable
    base: Servable
    weight: float
    rule: CanaryRule
    base_before: Sample
    before: Sample
    verdict: CanaryVerdict
    shadow: Shadow | None = None
    """By which its answers are compared, where the rule says so."""
    over: bool = False

    @property
    def beside(self) -> Disagreement:
        seen = self.shadow
        if seen is None:
            return Disagreement()
        return Disagreement(records=seen.records, changed=seen.changed, largest=seen.max_abs_error)


class Traffic:
    """All canaries and shadows of a fleet. Call its methods on the loop."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet = fleet
        self._models = fleet.models
        self._loop = loop
        self._canaries: dict[str, Canary] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin_canary(self, model: str, version: str, weight: float, rule: CanaryRule) -> None:
        """Sends `weight` (0 to 1) of the requests without a version to `version`, and watches it.

        Raises NotFound, NotReady, RequestError, Conflict for a second canary or the default version.
        """
        if not 0 < weight < 1:
            raise RequestError(f"the weight of a canary lies between 0 and 1, got {weight:g}")
        under_way = self._canaries.get(model)
        if under_way is not None and not under_way.over:
            raise Conflict(f"version {under_way.version.version} of model {model} is a canary already; end it first")
        default = self._models.default(model)
        if version == default:
            raise Conflict(f"version {version} answers model {model} already")
        found, base = self._models.find(model, version), self._models.find(model, default)
        shadow = self._compare(model, found) if rule.compares else None
        self._fleet.set_split(model, {default: 1 - weight, version: weight})
        if shadow is not None:
            self._models.shadows[model] = shadow
        self._canaries[model] = Canary(
            model=model,
            version=found,
            base=base,
            weight=weight,
            rule=rule,
            base_before=sample(base.stats),
            before=sample(found.stats),
            verdict=CanaryVerdict("watch"),
            shadow=shadow,
        )
        events.emit("canary.begun", model=model, version=version, weight=weight)
        self._wait()

    def _compare(self, model: str, canary: Servable) -> Shadow:
        """A new shadow for the canary. Raises Conflict where the model has one of another version."""
        other = self._models.shadows.get(model)
        if other is not None and other.version is not canary:
            raise Conflict(
                f"version {other.version.version} of model {model} is its shadow, and the canary's answers would be "
                "compared in its place",
                hint=f"end it first: DELETE /models/{model}/shadow",
            )
        return Shadow(canary)

    def end_canary(self, model: str) -> None:
        """Sends all requests to the default version. Raises NotFound when there is no canary, Conflict when the default
        version has lost its workers and the canary has some.
        """
        found = self._canaries.get(model)
        if found is None or found.over:
            raise NotFound(f"model '{model}' has no canary")
        if found.base.obstacle and not found.version.obstacle:
            raise Conflict(
                f"version {found.base.version} of model {model} would get all requests and cannot answer them: "
                f"{found.base.obstacle}",
                hint=f"scale it first, or make the canary the default (PUT /models/{model}/{found.version.version}"
                "/set-default)",
            )
        self._end(found, CanaryVerdict("roll back", "it was ended by hand"))

    def tick(self) -> None:
        for found in [one for one in self._canaries.values() if not one.over]:
            split = self._models.split(found.model)
            if split is None or found.version.version not in split.weights:
                self._stop(found)  # an operator has changed the split
                continue
            base = sample(found.base.stats, found.base_before)
            found.verdict = judge(base, sample(found.version.stats, found.before), found.rule, found.beside)
            if found.verdict.act != "watch":
                self._end(found, found.verdict)

    def _end(self, canary: Canary, verdict: CanaryVerdict) -> None:
        canary.verdict = verdict
        self._stop(canary)
        to, other = (canary.version, canary.base) if verdict.act == "promote" else (canary.base, canary.version)
        if to.obstacle and not other.obstacle:  # an operator scaled it to nothing, or its workers died
            events.emit("canary.kept", model=canary.model, version=other.version, why=to.obstacle)
            to = other
        try:
            self._fleet.set_default(canary.model, to.version)
        except TruelineError as error:  # the state file cannot be written, but the traffic moves
            self._models.set_default(canary.model, to.version)
            events.emit("canary.not_written", model=canary.model, why=error.message)
        word = "canary.promoted" if to is canary.version else "canary.rolled_back"
        events.emit(word, model=canary.model, version=canary.version.version, why=verdict.why)

    def _stop(self, canary: Canary) -> None:
        canary.over = True
        if canary.shadow is not None and self._models.shadows.get(canary.model) is canary.shadow:
            del self._models.shadows[canary.model]

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick_again)

    def _tick_again(self) -> None:
        self._timer = None
        self.tick()
        if any(not one.over for one in self._canaries.values()):
            self._wait()

    def set_shadow(self, model: str, version: str) -> None:
        """Copies the model's requests to `version`. Raises NotFound, NotReady."""
        found = self._models.find(model, version)
        _ = found.program.loaded
        self._models.shadows[model] = Shadow(found)
        events.emit("shadow.begun", model=model, version=version)

    def end_shadow(self, model: str) -> None:
        """Raises NotFound when there is none."""
        if self._models.shadows.pop(model, None) is None:
            raise NotFound(f"model '{model}' has no shadow")

    def facts(self, model: str) -> dict[str, Any]:
        """Where the requests of a model go. Raises NotFound."""
        found: dict[str, Any] = {"modelName": model, "default": self._models.default(model)}
        split, shadow, canary = self._models.split(model), self._models.shadows.get(model), self._canaries.get(model)
        found["split"] = dict(split.weights) if split is not None else {}
        if shadow is not None:
            found["shadow"] = shadow.facts()
        if canary is not None:
            seen = sample(canary.version.stats, canary.before)
            found["canary"] = {
                "version": canary.version.version,
                "weight": canary.weight,
                "requests": seen.requests,
                "failed": seen.failed,
                "over": canary.over,
                "verdict": canary.verdict.act,
                "why": canary.verdict.why,
            }
            if canary.shadow is not None:
                found["canary"]["compared"] = canary.shadow.facts()
        return found
