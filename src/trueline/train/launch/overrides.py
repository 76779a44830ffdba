"""Settings that a caller may give to a job, their checks, and those that a resumed job has to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypedDict

import msgspec

from trueline.errors import UsageError, closest
from trueline.recipe.contract import Defaults
from trueline.train.settings import JobSettings, Precision, Shuffle, check_backend, device_kind


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


MATHEMATICS = ("epochs", "global_batch", "seed", "micro_batch", "shuffle", "bitwise", "precision", "clip_norm",
               "ema")  # fmt: skip
"""What a job's result depends on: fixed for its whole life."""
_LEAST = {
    "epochs": 1, "global_batch": 1, "keep": 1, "max_failures": 1, "lease_s": 1, "seed": 0, "micro_batch": 0,
    "clip_norm": 0, "ema": 0, "evaluate_every": 0, "patience": 0, "readers": 0, "checkpoint_every": 0,
    "set_aside": 0, "page_port": 0,
}  # fmt: skip


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
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):  # settings are stored as JSON, which lacks it
            raise UsageError(f"{name} is {value}, expected a finite number")
    job = msgspec.structs.replace(job, **given)
    # Threads change the order of a sum, so bitwise reproducibility means one thread.
    job = msgspec.structs.replace(job, threads=1 if job.bitwise else max(1, cores // job.workers))
    try:
        job = msgspec.json.decode(msgspec.json.encode(job), type=JobSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting of the job is of the wrong kind: {error}") from error
    for name, least in _LEAST.items():
        if not getattr(job, name) >= least and not (job.script and name in ("epochs", "global_batch")):
            raise UsageError(f"{name} is {getattr(job, name)}, expected at least {least}")
    if job.page_port > 65535:
        raise UsageError(f"page_port is {job.page_port}, expected at most 65535")
    if job.ema >= 1:
        raise UsageError(f"ema is {job.ema}, expected a decay from 0 (none) to below 1, e.g. 0.999")
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


def defaults_of(defaults: Defaults) -> dict[str, Any]:
    """The recipe's own values, by the names of JobSettings."""
    return asdict(defaults)


def refuse_changes(earlier: JobSettings, later: JobSettings, where: str) -> None:
    """Raises UsageError when `later` would train something else than `earlier` did."""
    if later.recipe_digest != earlier.recipe_digest:
        raise UsageError(
            f"the recipe {later.recipe or later.script[0]} was changed since the job in {where} began",
            hint="restore the recipe, or train the changed one in a new job",
        )
    changed = [name for name in MATHEMATICS if getattr(earlier, name) != getattr(later, name)]
    if changed:
        before = ", ".join(f"{name} was {getattr(earlier, name)}" for name in changed)
        raise UsageError(f"the job in {where} is another one: {before}", hint="leave these out to resume with the same")
