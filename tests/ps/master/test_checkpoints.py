"""A halt and the checkpoints of a job with parameter servers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from trueline.ps.master.checkpoints import Checkpoints


def test_a_halt_while_a_checkpoint_is_written_ends_the_job_after_one_of_its_own():
    stopped, steps = [], iter((200, 203))
    master = SimpleNamespace(job_dir=Path("/job"), halting="", wanted=False, checkpoint_step=-1)

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
