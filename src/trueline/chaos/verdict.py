"""Whether a job ended as it had to, by evidence beside its own certificates: journal, weights, counting parameter."""

import json
import math
import sqlite3
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trueline.checkpoint import checkpoint
from trueline.train import settings as job_settings
from trueline.train.api import JobSummary
from trueline.train.job_dir import JobDir

COUNTER = "seen"
"""Name of a parameter with one number for each record, which counts the steps that the record was in."""

UNFELT = ("master", "freeze", "clock", "network", "disk", "agent", "zygote", "zombie")
"""Strikes after which the group need not form again."""
SHAKING = {*UNFELT, "both", "launcher", "all", "hang"} - {"clock"}
SHAKEN_S = 3.0
"""How long a job may be recovering from these strikes or a stopped worker: a lease, or the start of a process."""
UNDER_WAY_NS = 100_000_000
"""A step that was in progress when the strike came may still be applied."""
SLOW_MS, SLOW_STEPS = 8000.0, 8
"""Longer than any regroup, and than a lease with the start of a replacement; or the time of 8 undisturbed steps."""
AGENTLESS_NS = 30_000_000_000
"""How long a new agent may import torch on a busy machine; until then no worker is replaced."""
SINGLE = 1e-6
"""Losses are reported in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """Steps, losses and weights of an undisturbed job."""

    steps: int
    step_s: float
    losses: dict[int, float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    violations: tuple[str, ...] = ()
    lost: int = 0
    repeated: int = 0
    difference: float = 0.0
    """The largest one of the weights, relative to the parameter's largest value."""
    loss_difference: float = 0.0
    rolled_back: int = 0
    """Steps that were taken back because no process held their state, and repeated."""
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)


def rows(job_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    with sqlite3.connect(JobDir(job_dir).journal) as log:
        return [(kind, json.loads(body)) for kind, body in log.execute("SELECT kind, body FROM log ORDER BY seq")]


def observe(job_dir: Path) -> Calm:
    commits = [body for kind, body in rows(job_dir) if kind == "COMMIT"]
    took = [(after["at_ns"] - before["at_ns"]) / 1e9 for before, after in pairwise(commits)]
    facts = json.loads(JobDir(job_dir).summary.read_text())
    weights = checkpoint.read(facts["checkpoint"]).state["model"]
    losses = {body["step"]: body["loss"] for body in commits}
    return Calm(steps=facts["steps"], step_s=statistics.median(took or [0.0]), losses=losses, weights=weights)


def judge(job_dir: Path, usual: Calm, struck: Sequence[tuple[str, int]], *, tolerance: float) -> JobVerdict:
    """What is wrong with the job in `job_dir`; `struck`: kind and instant (monotonic, ns) of each strike."""
    if not JobDir(job_dir).summary.exists():
        return JobVerdict(violations=("the job did not finish",))
    log = rows(job_dir)
    losses, wrong, rolled_back = surviving(log)
    facts = json.loads(JobDir(job_dir).summary.read_text())
    if not JobSummary(facts).exactly_once:
        wrong.append("a certificate does not say that every record was applied exactly once")
    if facts["set_aside"] or facts["quarantined"]:
        wrong.append(f"set aside: {facts['set_aside']}; quarantined: {facts['quarantined']}")
    weights = checkpoint.read(facts["checkpoint"]).state["model"]
    lost, repeated = count_applications(weights, facts["records"], job_settings.load(job_dir).epochs)
    if lost or repeated:
        wrong.append(f"the model has counted {lost} records too few and {repeated} too many")
    pairs = [(losses[step], value) for step, value in usual.losses.items() if step in losses]
    loss = max((abs(one - other) / max(1.0, abs(other)) for one, other in pairs), default=0.0)
    difference = distance(weights, usual.weights)
    if loss > max(tolerance, SINGLE):
        wrong.append(f"the loss curve differs by {loss:.2e} (relative) from the undisturbed run's")
    if not difference <= tolerance:
        wrong.append(f"the weights differ by {difference:.2e} (relative) from the undisturbed run's")
    felt, slow_ms = gaps(log, struck), max(SLOW_MS, SLOW_STEPS * 1e3 * usual.step_s)
    slow = [f"{gap:.0f} ms without a step after {kind}" for kind, some in felt.items() for gap in some if gap > slow_ms]
    return JobVerdict(
        violations=(*wrong, *slow), lost=lost, repeated=repeated, difference=difference, loss_difference=loss,
        rolled_back=rolled_back, gaps_ms=felt,
    )  # fmt: skip


def surviving(log: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[int, float], list[str], int]:
    """Losses of the steps that survived, what is wrong with the log, and how many steps were taken back.

    >>> surviving([("COMMIT", {"step": 0, "loss": 2.0}), ("COMMIT", {"step": 0, "loss": 2.0})])[1]
    ['step 0 is in the log twice and was not taken back between']
    """
    losses: dict[int, float] = {}
    wrong, back = [], 0
    for kind, body in log:
        if kind == "TRUNCATE":
            gone = [step for step in losses if step >= body["steps"]]
            back += len(gone)
            for step in gone:
                del losses[step]
        elif kind == "COMMIT":
            if body["step"] in losses:
                wrong.append(f"step {body['step']} is in the log twice and was not taken back between")
            losses[body["step"]] = body["loss"]
    return losses, wrong, back


def count_applications(weights: dict[str, torch.Tensor], records: int, epochs: int) -> tuple[int, int]:
    """How many times records were applied too rarely and too often, where the model counts them."""
    for name, value in weights.items():
        if name.rpartition(".")[2] == COUNTER and value.numel() == records:
            counts = value.double().round().reshape(-1) - epochs
            return int(-counts.clamp(max=0).sum()), int(counts.clamp(min=0).sum())
    return 0, 0


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of the same tensor.

    >>> distance({"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([2.0, 4.0])})
    0.25
    """
    if some.keys() != others.keys() or not all(bool(torch.isfinite(value).all()) for value in some.values()):
        return math.inf
    found = [0.0]
    for name, value in others.items():
        if value.numel() and not torch.equal(some[name], value):
            off, scale = (some[name].double() - value.double()).abs().max(), value.double().abs().max()
            found.append(float(off / scale.clamp(min=1e-300)))
    return max(found)


def gaps(log: Sequence[tuple[str, dict[str, Any]]], struck: Sequence[tuple[str, int]]) -> dict[str, list[float]]:
    """For each strike that made the group form again, the milliseconds until the first step after that.

    Left out are strikes shortly after one on master, agent or network, and long gaps in which workers may have waited
    for the agent that starts their replacements.
    """
    regrouped = sorted(
        (body["at_ns"], body["at_ns"] - int(1e6 * body["gap_ms"]))
        for kind, body in log
        if kind == "COMMIT" and body["gap_ms"]
    )
    found: dict[str, list[float]] = {}
    calm_ns = served_ns = 0
    for kind, at in struck:
        agentless, served_ns = at < served_ns, at + AGENTLESS_NS if kind in ("agent", "zombie") else served_ns
        shaken_ns = int(1e9 * SHAKEN_S) if kind in SHAKING or kind.endswith("(stop)") else 0
        early, calm_ns = at < calm_ns, max(calm_ns, at + shaken_ns if shaken_ns else 0)
        later, since = next((step for step in regrouped if step[0] > at), (0, 0))
        felt = later and since < at + UNDER_WAY_NS  # else the worker had not joined yet
        gap_ms = (later - at) / 1e6
        if felt and kind not in UNFELT and not early and not (agentless and gap_ms > SLOW_MS):
            found.setdefault(kind, []).append(round(gap_ms, 1))
    return found
