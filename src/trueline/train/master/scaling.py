"""Autoscaling of a job, while exactly the target number of workers is at work."""

import asyncio
import contextlib
import math

from trueline.train.master.master import TICK_S, Master
from trueline.train.membership import events as h
from trueline.train.membership.autoscale import Bounds, Scaling, decide

CAPACITY_S = 30.0
"""How long the engine's capacity is kept."""


async def run_scaling(master: Master) -> None:
    """Decides about once a second, until the master stops."""
    state, scaling, capacity, asked_at = master.state, Scaling(), None, -math.inf
    while not master.stopped.is_set():
        await asyncio.sleep(4 * TICK_S)
        if master.now() - asked_at > CAPACITY_S:
            with contextlib.suppress(OSError):  # while the engine is away, its last capacity counts
                capacity, asked_at = await master.engine.capacity(), master.now()
        at_work = state.phase == "running" and state.released and not state.finishing
        if not at_work or len(state.view) != state.target_workers:
            continue
        bounds = Bounds(low=master.job.min_workers, high=master.job.workers, capacity=capacity)
        target, why = decide(scaling, len(state.view), master.progress.records_applied, master.now(), bounds)
        if why:
            master.handle(h.Scale(target + state.workers - state.target_workers, why))
