"""The strikes of a storm and their times: a function of its seed, so that a violation can be reproduced. Pure.

A strike at a named **point** is an injected fault: the worker does it to itself, exactly there. All others are
**blind**: the storm does them from outside at a random instant after the job has reported a step.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from trueline.train.settings import Fault, Phase

POINTS: tuple[Phase, ...] = get_args(Phase)
KINDS = {
    "points": 40, "worker": 24, "two": 6, "all": 2, "hang": 2, "master": 6, "both": 3, "freeze": 2, "agent": 3,
    "zygote": 2, "launcher": 2, "zombie": 2, "clock": 3, "network": 2, "reset": 3, "disk": 1,
}  # fmt: skip
"""Kind of strike -> its weight in the random choice."""
MEANING = {
    "points": "a worker at a named point of the protocol, or stopped there",
    "worker": "SIGKILL to a worker",
    "two": "SIGKILL to two workers at once",
    "all": "SIGKILL to all workers at once",
    "hang": "SIGSTOP to a worker",
    "master": "SIGKILL to the master",
    "both": "SIGKILL to the master and a worker at once",
    "freeze": "SIGSTOP to the master, later SIGCONT",
    "agent": "SIGKILL to the agent that forks the workers",
    "zygote": "SIGKILL to the process that forks masters, which takes its master along",
    "launcher": "SIGKILL to the launcher; the job is resumed",
    "zombie": "a worker is stopped, given up while no agent can kill it, and wakes up again",
    "clock": "the wall clock jumps by up to ten days",
    "network": "all packets are lost for a moment",
    "reset": "all connections of a worker are reset",
    "disk": "the disk is full for a moment",
}
ROOTS = ("network", "reset", "disk")
"""Kinds that need a network and mounts of the storm's own."""
SYSTEM = ("master", "both", "agent", "zygote", "zombie")
"""Kinds after which the launcher has to start a process again."""
RESTARTS = 8
"""Deaths of master and agent in one life of a launcher, which gives up after ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    step: int
    """The number of applied steps at which it is due."""
    kind: str
    delay_s: float = 0.0
    """Time from the report of that step."""
    pick: float = 0.0
    """From 0 to 1: chooses the worker, or a duration or distance."""
    fault: Fault | None = None


def plan(
    seed: int, *, steps: int, slots: int, every: int, kinds: Collection[str], points: Sequence[Phase] = POINTS
) -> list[Strike]:
    """The strikes of a job of `steps` steps, about one each `every` steps, the first when a checkpoint can exist."""
    dice = random.Random(seed)
    known = [kind for kind in KINDS if kind in kinds]
    found, restarts = [], 0
    at = 2 * every
    while at < steps - every // 2:
        (kind,) = dice.choices(known, [KINDS[kind] for kind in known])
        restarts = 0 if kind == "launcher" else restarts + (kind in SYSTEM)
        if restarts > RESTARTS and kind in SYSTEM:
            kind = next((other for other in ("worker", "points", "two") if other in known), "worker")
        fault = None
        if kind == "points":
            number = 19 if dice.random() < 0.05 else 9
            fault = Fault(step=at, slot=dice.randrange(slots), incarnation=-1, phase=dice.choice(points), signal=number)
        found.append(Strike(step=at, kind=kind, delay_s=dice.uniform(0, 0.05), pick=dice.random(), fault=fault))
        at += dice.randint(max(1, every // 2), every + every // 2)
    if "points" in kinds:
        last = Fault(step=steps, slot=dice.randrange(slots), incarnation=-1, phase="finishing")
        found.append(Strike(step=steps, kind="points", fault=last))
    return found
