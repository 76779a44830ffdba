"""A halt and the checkpoints of a job with parameter servers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from trueline.ps.master.checkpoints import Checkpoints


def test_a_halt_while_a_checkpoint_is_written_ends_the_job_after_one_of_its_own():
    stopped, steps = [], iter((200, 203))
    master = SimpleNamespace(job_dir=Path("/job"), halting="", wanted=0, checkpoint_step=-1)

    async def stop(why, grace_s):
        stopped.append(why)

    class Written(Checkpoints):
        async def _save_parts(self):
            master.halting = "trueline halt"
            return next(steps), []

        async def _assemble(self, step, certificates):
            master.checkpoint_step = step

    checkpoints = Written(master, settle=stop, stop=stop, conclude=stop)
    asyncio.run(checkpoints._write())
    assert (master.checkpoint_step, stopped) == (200, [])
    asyncio.run(checkpoints._write())
    assert (master.checkpoint_step, stopped) == (203, ["trueline halt"])


def test_a_checkpoint_that_is_asked_for_while_one_is_written_is_not_the_older_one():
    steps, due = iter((200, 203)), []
    master = SimpleNamespace(job_dir=Path("/job"), halting="", wanted=0, checkpoint_step=-1)
    master.job, master.ledger = SimpleNamespace(checkpoint_every=1000), SimpleNamespace(finished=False, steps=203)

    class Written(Checkpoints):
        async def _save_parts(self):
            master.wanted = 203
            return next(steps), []

        async def _assemble(self, step, certificates):
            master.checkpoint_step = step

    checkpoints = Written(master, settle=None, stop=None, conclude=None)
    for _ in range(2):
        asyncio.run(checkpoints._write())
        due.append((master.checkpoint_step, master.wanted, checkpoints._due))
    assert due == [(200, 203, True), (203, 0, False)]
