"""Settings that a caller may give to a job, their checks, and those that a resumed job has to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

import msgspec

from trueline.errors import UsageError, closest
from trueline.recipe.settings import Precision, Shuffle, TrainingSettings
from trueline.settings import check, declared
from trueline.train.settings import JobSettings, check_backend, device_kind


class Overrides(TypedDict, total=False):
    """Settings of `JobSettings` that a caller may give; None or left out: the recipe's, else the default."""

    epochs: int | None
    global_batch: int | None
    seed: int | None
    micro_batch: int | None
    shuffle: Shuffle | None
    readers: int | None
    bitwise: bool | None
    precision: Precision | None
    clip_norm: float | None
    ema: float | None
    compile: bool | None
    evaluate_every: int | None
    monitor: str | None
    patience: int | None
    checkpoint_every: int | None
    checkpoints: str | None
    keep: int | None
    set_aside: int | None
    autoscale: bool | None
    lease_s: float | None
    max_failures: int | None
    page_port: int | None
    device: str | None
    backend: str | None
    find_unused_parameters: bool | None


def collect_overrides(overrides: Overrides) -> dict[str, Any]:
    """The overrides that are not None. Raises UsageError for an unknown setting."""
    for name in overrides:
        if name not in Overrides.__annotations__:
            near = closest(name, Overrides.__annotations__)
            raise UsageError(f"there is no setting '{name}'", hint=f"did you mean '{near}'?" if near else "")
    return {name: value for name, value in overrides.items() if value is not None}


def apply_overrides(
    job: JobSettings, overrides: Overrides, *, cores: int, metrics: Mapping[str, Any] | None = None
) -> JobSettings:
    """`job` with the overrides, checked. `metrics`: the recipe's, by name. Raises UsageError."""
    given = collect_overrides(overrides)
    job = replace(job, **given)
    # Threads change the order of a sum, so bitwise reproducibility means one thread.
    job = replace(job, threads=1 if job.bitwise else max(1, cores // job.workers))
    try:
        job = msgspec.convert(msgspec.to_builtins(job), JobSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting of the job is of the wrong kind: {error}") from error
    check(job, unchecked=("epochs", "global_batch") if job.script else ())
    device_kind(job.device)
    check_backend(job.backend)
    _check_monitor(job.monitor, metrics or {})
    return job


def _check_monitor(monitor: str, metrics: Mapping[str, Any]) -> None:
    known = ("loss", *metrics)
    if monitor and monitor.removeprefix("-") not in known:
        raise UsageError(
            f"monitor is '{monitor}', and the recipe has no such metric",
            hint=f"one of {', '.join(known)}; smaller is better, -NAME: larger is",
        )


def refuse_changes(earlier: JobSettings, later: JobSettings, where: str) -> None:
    """Raises UsageError when `later` would train something else than `earlier` did."""
    if later.recipe_digest != earlier.recipe_digest:
        raise UsageError(
            f"the recipe {later.recipe or later.script[0]} was changed since the job in {where} began",
            hint="restore the recipe, or train the changed one in a new job",
        )
    fixed = [one.name for one in declared(TrainingSettings) if one.setting.fixed]
    changed = [name for name in fixed if getattr(earlier, name) != getattr(later, name)]
    if changed:
        before = ", ".join(f"{name} was {getattr(earlier, name)}" for name in changed)
        raise UsageError(f"the job in {where} is another one: {before}", hint="leave these out to resume with the same")
